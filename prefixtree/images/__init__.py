"""A wing: images and videos in a forest."""

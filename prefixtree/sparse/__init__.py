"""A wing: layers whose queries attend to chosen or compressed keys."""

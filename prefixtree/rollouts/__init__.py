"""Rollouts: files of token ids or chats in, sequences with loss masks, groups and turns out."""

"""Rollouts: files of token ids or chats in, sequences with loss masks, groups and turns out."""

from prefixtree.rollouts.chat import ChatTokenizer, Conversation
from prefixtree.rollouts.image_messages import ImageBatch, RolloutImage
from prefixtree.rollouts.reading import read_rollouts
from prefixtree.rollouts.sequences import Rollouts, expand_turns

__all__ = [
    "ChatTokenizer",
    "Conversation",
    "ImageBatch",
    "RolloutImage",
    "Rollouts",
    "expand_turns",
    "read_rollouts",
]

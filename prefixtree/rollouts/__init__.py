"""Rollouts: files of token ids or chats in, sequences with loss masks, groups and turns out."""

from prefixtree.rollouts.chat import ChatTokenizer, Conversation
from prefixtree.rollouts.picture_messages import PictureBatch, RolloutPicture
from prefixtree.rollouts.reading import read_rollouts
from prefixtree.rollouts.sequences import Rollouts, expand_turns

__all__ = [
    "ChatTokenizer",
    "Conversation",
    "PictureBatch",
    "RolloutPicture",
    "Rollouts",
    "expand_turns",
    "read_rollouts",
]

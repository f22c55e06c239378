"""How files of tests are known to have some that are marked `full`, without importing them."""

from __future__ import annotations

MARKS_FULL = r"mark\.full\b|\b(mostly|mostly_full|each_once)\("

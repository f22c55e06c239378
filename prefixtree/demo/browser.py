"""A small fake browser: a web shop whose pages are drawn, for an agent that looks at screenshots.

Deterministic: the same clicks and words lead to the same page, and the same page to the same
pixels. So screenshots repeat along a history, and in its branches.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

HEIGHT, WIDTH = 96, 160
_SHELVES = {
    "kettles": {"red kettle": 24, "blue kettle": 19},
    "lamps": {"desk lamp": 31, "garden lamp": 12, "night lamp": 9},
    "books": {"atlas": 40, "cookbook": 22},
}
PRICES = {item: price for shelf in _SHELVES.values() for item, price in shelf.items()}
_COLOURS = {
    "red kettle": (201, 60, 60),
    "blue kettle": (66, 99, 184),
    "desk lamp": (240, 200, 90),
    "garden lamp": (96, 150, 90),
    "night lamp": (110, 90, 150),
    "atlas": (70, 150, 170),
    "cookbook": (190, 130, 90),
}
_HOME, _SEARCH, _BASKET, _DONE = "home", "search", "basket", "thanks"
_ADD, _ORDER, _BACK = "add to basket", "order", "back"


@dataclass(frozen=True)
class Browser:
    """The state of the browser; `click` and `type` give the next one.

    Attributes:
        page: home, search, a shelf, an item, basket or thanks.
        query: the words in the search field.
        basket: the items in it.
        visited: the pages before this one, for going back.
    """

    page: str = _HOME
    query: str = ""
    basket: tuple[str, ...] = ()
    visited: tuple[str, ...] = ()

    @property
    def ordered(self) -> bool:
        """Whether the basket was ordered; nothing is to be done then."""
        return self.page == _DONE

    @property
    def links(self) -> list[str]:
        """The links that can be clicked."""
        if self.page == _HOME:
            return [*_SHELVES, _BASKET]
        if self.page == _BASKET:
            return [_ORDER, _HOME] if self.basket else [_HOME]
        if self.page == _DONE:
            return []
        return [*self._items(), *([_ADD] if self.page in PRICES else []), _BASKET, _BACK]

    def click(self, link: str) -> tuple[Browser, str]:
        """The browser after a click, and what the tool says of it."""
        if link not in self.links:
            return self, f"there is no {link} here."
        if link == _ADD:
            after = replace(self, basket=(*self.basket, self.page))
            return after, f"the {self.page} is in the basket."
        if link == _BACK:
            return replace(self, page=self.visited[-1], visited=self.visited[:-1]), "went back."
        page = {_ORDER: _DONE}.get(link, link)
        return replace(self, page=page, visited=(*self.visited, self.page)), f"opened {page}."

    def type(self, words: str) -> tuple[Browser, str]:
        """The browser after words typed into the search field, and what the tool says of it."""
        after = replace(self, page=_SEARCH, query=words, visited=(*self.visited, self.page))
        return after, f"{len(after._items())} found for {words}."

    def _items(self) -> list[str]:
        if self.page == _SEARCH:
            return [item for item in PRICES if set(self.query.split()) & set(item.split())]
        return list(_SHELVES.get(self.page, ()))

    def screenshot(self) -> np.ndarray:
        """The page as the agent sees it: uint8 [HEIGHT, WIDTH, 3]."""
        screen = np.full((HEIGHT, WIDTH, 3), 250, np.uint8)
        _fill(screen, 0, 0, 11, WIDTH, (38, 70, 83))
        _write(screen, 3, 4, f"shop / {self.page}", (255, 255, 255))
        _write(screen, 3, 118, f"basket {len(self.basket)}", (233, 196, 106))
        _fill(screen, 15, 4, 24, 110, (255, 255, 255), border=(120, 120, 120))
        _write(screen, 17, 7, self.query if self.page == _SEARCH else "", (60, 60, 60))
        _fill(screen, 15, 114, 24, 156, (42, 157, 143))
        _write(screen, 17, 121, "search", (255, 255, 255))
        row = 30
        if self.page in PRICES:
            _fill(screen, 30, 4, 78, 60, _COLOURS[self.page])
            _write(screen, 32, 68, self.page, (0, 0, 0))
            _write(screen, 42, 68, f"price {PRICES[self.page]}", (0, 0, 0))
            row = 54
        elif self.page == _DONE:
            _write(screen, 50, 40, "thank you. order 4711.", (0, 0, 0))
        shown = self.basket if self.page == _BASKET else self._items()
        for item in shown:
            _fill(screen, row, 4, row + 9, 18, _COLOURS[item])
            _write(screen, row + 2, 24, f"{item}  {PRICES[item]}", (0, 0, 0))
            row += 12
        left = 68 if self.page in PRICES else 4
        for link in (link for link in self.links if link not in shown):
            _fill(screen, row, left, row + 9, left + 4 * len(link) + 7, (244, 162, 97))
            _write(screen, row + 2, left + 4, link, (0, 0, 0))
            row += 12
        return screen


# ---- drawing -------------------------------------------------------------------------------------

# 3 x 5 pixels a letter: an octal digit is a row
_ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789./"
_GLYPHS = """
25755 65656 34443 65556 74647 74644 34553 55755 72227 11152 55655 44447 57755 65555 25552 65644
25563 65655 34216 72222 55557 55552 55775 55255 55222 71247 75557 26227 61247 61216 55711 74616
34757 71222 75757 75716 00002 11244
"""
_LETTERS = dict(zip(_ALPHABET, _GLYPHS.split(), strict=True))


def _write(screen: np.ndarray, top: int, left: int, text: str, colour: tuple[int, ...]) -> None:
    for letter in text:
        if top + 5 > HEIGHT or left + 3 > WIDTH:
            return
        rows = _LETTERS.get(letter, "00000")
        dots = np.array([[int(row) >> bit & 1 for bit in (2, 1, 0)] for row in rows], bool)
        screen[top : top + 5, left : left + 3][dots] = colour
        left += 4


def _fill(
    screen: np.ndarray,
    top: int,
    left: int,
    bottom: int,
    right: int,
    colour: tuple[int, ...],
    border: tuple[int, ...] | None = None,
) -> None:
    screen[top:bottom, left:right] = colour if border is None else border
    if border is not None:
        screen[top + 1 : bottom - 1, left + 1 : right - 1] = colour

"""The folder on disk in which flash-attn-4 keeps compiled kernels for later processes.

flash-attn-4 can keep kernels on disk, and by default does not.
"""

from __future__ import annotations

import hashlib
import os
import stat
import sys
import tempfile
from pathlib import Path
from typing import Any

# flash-attn-4 reads both when it is imported; its keys of compiled kernels hold its source, the
# versions of its compilers and the call
ENABLED = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"
FOLDER = "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"
_READS_THEM = "flash_attn.cute.cache_utils"


def keep_on_disk() -> None:
    """Switches flash-attn-4's cache on disk on, before it is imported, unless the user decided."""
    # a user who has set it (to 0 or 1), or has imported flash-attn-4, has decided
    if ENABLED in os.environ or _READS_THEM in sys.modules:
        return
    if FOLDER not in os.environ:
        folder = own_folder()
        # without a folder from which it is safe to load code, kernels stay in memory
        if folder is None:
            return
        os.environ[FOLDER] = str(folder)
    os.environ[ENABLED] = "1"


def own_folder() -> Path | None:
    """Makes a folder for temporary files that is this user's alone, or returns None."""
    # on this machine, because flash-attn-4 locks its files; checked, because code is loaded from
    # it: a folder of this name that another user made, or may write to, is not taken
    folder = Path(tempfile.gettempdir()) / f"prefixtree-{os.getuid()}" / "flash-attn-4"
    try:
        for part in (folder.parent, folder):
            part.mkdir(mode=0o700, exist_ok=True)
            status = part.lstat()
            is_ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
            if not is_ours or status.st_mode & 0o022:
                return None
    except OSError:
        return None
    return folder


def cache_of(name: str, *modules: str) -> Any:
    """Makes flash-attn-4's cache for kernels of ours, which the text of `modules` defines."""
    from flash_attn.cute.cache_utils import get_jit_cache

    # flash-attn-4's keys do not contain this text, so the folder's name does
    text = b"".join(Path(module).read_bytes() for module in modules)
    return get_jit_cache(f"prefixtree_{name}_{hashlib.sha256(text).hexdigest()[:16]}")

"""Where flash-attn-4's compiled kernels are kept on disk, so that a process compiles none that an
earlier one compiled. flash-attn-4 can do this and by default does not."""

from __future__ import annotations

import hashlib
import os
import stat
import sys
import tempfile
from pathlib import Path
from typing import Any

# flash-attn-4 reads both when it is imported. It looks compiled kernels up by its source, the
# versions of what it compiles with, and a key that says the call
ENABLED = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"
FOLDER = "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"
_READS_THEM = "flash_attn.cute.cache_utils"


def keep_on_disk() -> None:
    """Switches flash-attn-4's cache on disk on, before it is imported.

    A user who has set `FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED` (to 0 or 1), or has imported
    flash-attn-4, has decided. Processes that this one starts inherit the setting. Where there is no
    folder that is safe to load code from, kernels stay in memory.
    """
    if ENABLED in os.environ or _READS_THEM in sys.modules:
        return
    if FOLDER not in os.environ:
        folder = own_folder()
        if folder is None:
            return
        os.environ[FOLDER] = str(folder)
    os.environ[ENABLED] = "1"


def own_folder() -> Path | None:
    """A folder for temporary files that is this user's alone; None where there is none.

    It lies on this machine, as flash-attn-4 locks its files. It is checked, as code is loaded from
    it: a folder of this name that another user made, or may write to, is not taken.
    """
    folder = Path(tempfile.gettempdir()) / f"prefixtree-{os.getuid()}" / "flash-attn-4"
    try:
        for part in (folder.parent, folder):
            part.mkdir(mode=0o700, exist_ok=True)
            found = part.lstat()
            is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
            if not is_ours or found.st_mode & 0o022:
                return None
    except OSError:
        return None
    return folder


def cache_of(name: str, *modules: str) -> Any:
    """flash-attn-4's cache for kernels of ours: on disk where its own are.

    Args:
        name: of the kernels.
        modules: the files whose text makes them others than flash-attn-4's. Its keys do not contain
            this text, so the folder's name does.
    """
    from flash_attn.cute.cache_utils import get_jit_cache

    text = b"".join(Path(module).read_bytes() for module in modules)
    return get_jit_cache(f"prefixtree_{name}_{hashlib.sha256(text).hexdigest()[:16]}")

"""Reading files that somebody may have damaged."""

from pathlib import Path

import numpy as np
import pytest

from scripts.observe.files import read_arrays


@pytest.mark.slow
def test_whichever_bit_is_changed_arrays_are_read_or_called_damaged(tmp_path: Path) -> None:
    """Among the bits are those by which a zip file would be encrypted, or compressed by a method of the future."""
    path = tmp_path / "step.npz"
    np.savez_compressed(path, ids=np.arange(5), format=np.array(2))
    data = path.read_bytes()
    num_damaged = 0
    for bit in range(8 * len(data)):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        try:
            read_arrays(path)
        except ValueError as error:
            num_damaged += 1
            assert str(error).startswith("it is damaged: ")
    assert num_damaged > len(data)

"""Memory of large bodies, which the process returns."""

import subprocess
import sys

import pytest

SCRIPT = """
import ctypes, sys
from lmchat.server.http.process import return_large_buffers

class Info(ctypes.Structure):
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]

mapped = getattr(ctypes.CDLL(None), "mallinfo2", None)
if mapped is None:
    sys.exit(5)
mapped.restype = Info
if "mend" in sys.argv:
    return_large_buffers()
large = bytearray(16 << 20)
del large
before = mapped().hblks
large = bytearray(2 << 20)
print(mapped().hblks - before)
"""


@pytest.mark.parametrize(("mend", "mapped"), [("mend", 1), ("", 0)])
def test_large_buffers_are_mapped_by_themselves_also_after_larger_ones(mend, mapped):
    run = subprocess.run([sys.executable, "-c", SCRIPT, mend], capture_output=True, text=True)
    if run.returncode == 5:
        pytest.skip("needs glibc 2.33")
    assert (run.stdout.strip(), run.stderr) == (str(mapped), "")

"""How much memory a process uses, for the tests that look whether it grows."""

import ctypes
import gc

_FIELDS = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")


class _Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in _FIELDS]


def allocated():
    """Bytes that malloc has given out: unlike the size of the process, the same at the same place of every step."""
    gc.collect()
    mallinfo = ctypes.CDLL(None).mallinfo2  # of glibc 2.33 and later
    mallinfo.restype = _Info
    info = mallinfo()
    return info.uordblks + info.hblkhd

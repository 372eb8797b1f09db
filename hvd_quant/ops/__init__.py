"""The codecs' arithmetic, three times under the same names.

``generic``, of which ``linear`` is a part, is the readable specification and runs on NumPy arrays and on PyTorch tensors of any
device; ``torch`` and ``tensorflow`` call the native kernels on the CPU and give the same bytes. Compressors receive one of the
three as ``ops``.
"""

"""On PYTHONPATH of a server under test: the CPU kernels, before vLLM starts."""

import cpu

cpu.install()

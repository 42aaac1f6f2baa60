"""How malloc is set for trainings of language models on CPUs, on both sides of a comparison.

glibc gives large blocks back to the kernel at once, and every update pays for their pages again:
this keeps them. Only the environment that Python starts with counts. Source: mallopt(3).
"""

from __future__ import annotations

MALLOC = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "17179869184",
    "MALLOC_TOP_PAD_": "268435456",
}

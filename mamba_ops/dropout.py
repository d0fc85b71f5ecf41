"""Which elements dropout drops: a hash of integers, so the same on any device and when it is computed again.

With k0, k1 = `key_words(dropout, name)`, for token t (counted in the optimizer step) and column c, modulo 2^32:
h = mix((mix(k0 ^ t) + k1) ^ (c GOLDEN)); an element is dropped where h < `threshold(rate)`, else divided by 1 - rate.
mix is C. Wellons' lowbias32: x ^= x >> 16; x *= 0x7feb352d; x ^= x >> 15; x *= 0x846ca68b; x ^= x >> 16.
"""

import hashlib

from mamba_ops.ops import Dropout

FACTORS = 0x7FEB352D, 0x846CA68B
GOLDEN = 0x9E3779B9


def key_words(dropout: Dropout, name: str) -> tuple[int, int]:
    """Return the two 32-bit words that stand for seed, step and the name of the adapted weight."""
    found = hashlib.sha256(f"{dropout.seed} {dropout.step} {name}".encode()).digest()
    return int.from_bytes(found[:4], "little"), int.from_bytes(found[4:8], "little")


def threshold(rate: float) -> int:
    """Return the 32-bit number below which a hash means that its element is dropped; 0 <= rate < 1."""
    return min(round(rate * 2**32), 2**32 - 1)

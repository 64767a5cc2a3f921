"""NumPy's arrays by what they hold. Of a bare `np.ndarray` type checkers know nothing: a sum of two is anything."""

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Ints: TypeAlias = NDArray[np.signedinteger]
Floats: TypeAlias = NDArray[np.floating]
Bools: TypeAlias = NDArray[np.bool_]

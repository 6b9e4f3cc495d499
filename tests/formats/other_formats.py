"""Elements and a format that the catalogue does not have: whoever adds one adds a value, nothing else."""

import ml_dtypes
import numpy as np

from halfbyte.formats import MXFP8, BlockFormat, Element

E2M3 = Element("E2M3", 6, 3, 1, 7.5, np.dtype(ml_dtypes.float6_e2m3fn))
E3M2 = Element("E3M2", 6, 2, 3, 28.0, np.dtype(ml_dtypes.float6_e3m2fn))
MXFP6 = BlockFormat("mxfp6", E3M2, 32, MXFP8.scale)

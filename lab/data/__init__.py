"""On what models are trained, and which rank sees which sample when."""

from lab.data.data import Data as Data

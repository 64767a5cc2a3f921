from .growth import GrowReport as GrowReport
from .growth import grow as grow

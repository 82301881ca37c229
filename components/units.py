from components.core.units import *  # noqa  temporary alias

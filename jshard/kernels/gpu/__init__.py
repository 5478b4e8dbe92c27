"""The kernels for GPUs (Mosaic GPU), one file per family of chips. Imported only where one is asked for."""

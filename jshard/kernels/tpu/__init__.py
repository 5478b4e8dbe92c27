"""The kernels for TPUs (Mosaic), a file per family, imported on first use."""

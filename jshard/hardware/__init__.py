"""Hardware: the chips known to jshard, and the devices of this host. No JAX."""

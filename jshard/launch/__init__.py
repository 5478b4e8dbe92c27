"""Several processes as a single program: they meet, agree before the first step, are watched, and end
together. Only `initialize`, `kv_store` and `watchdog` use JAX; processes are started and ended without it."""

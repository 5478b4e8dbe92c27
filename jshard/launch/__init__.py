"""Several processes as one program: they find each other, agree before the first step, are watched, and end together.

Only `initialize`, `kv_store` and `watchdog` use JAX; what starts and ends processes does without it.
"""

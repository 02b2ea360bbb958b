"""The scheduler's shape: what looks for its methods finds them."""


class Scheduler:
    def is_fully_idle(self, for_health_check=False, ignore_waiting=False):
        raise NotImplementedError

    def flush_cache(self, empty_cache=True):
        raise NotImplementedError

"""The platform: CUDA where the installation has cards, else CPU."""

from simulated_engine.vllm import Vllm

from vllm._version import __version__


class Platform:
    def __init__(self):
        self._has_cards = bool(Vllm(__version__).cards)
        self.device_type = "cuda" if self._has_cards else "cpu"

    def is_unspecified(self):
        return False

    def is_sleep_mode_available(self):
        return self._has_cards


current_platform = Platform()

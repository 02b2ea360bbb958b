"""The adapter over the memory saver."""

import torch_memory_saver

_memory_saver = torch_memory_saver.torch_memory_saver


class TorchMemorySaverAdapter:
    """Pausable regions of memory, by tag."""

    @staticmethod
    def create(enable):
        return TorchMemorySaverAdapter()

    def region(self, tag, enable_cpu_backup=False):
        return _memory_saver.region(tag=tag, enable_cpu_backup=enable_cpu_backup)

    def pause(self, tag):
        _memory_saver.pause(tag=tag)

    def resume(self, tag):
        _memory_saver.resume(tag=tag)

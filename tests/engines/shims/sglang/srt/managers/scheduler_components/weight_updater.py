"""The weight updater's shape: park, wake and reload inside the scheduler."""


class SchedulerWeightUpdater:
    def update_weights_from_disk(self, recv_req):
        raise NotImplementedError

    def release_memory_occupation(self, recv_req):
        raise NotImplementedError

    def resume_memory_occupation(self, recv_req):
        raise NotImplementedError

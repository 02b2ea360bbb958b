"""Names of the series that `/metrics` shows."""

SERIES = (
    "sglang:num_running_reqs",
    "sglang:num_queue_reqs",
    "sglang:token_usage",
    "sglang:time_to_first_token_seconds",
    "sglang:e2e_request_latency_seconds",
)

"""What runs on a GPU machine: owned processes, their logs and ports, memory domains, the journal, the ingress.

`agent.HostAgent` takes the session's commands; `ingress.Ingress` is the router's way into the engines.
"""

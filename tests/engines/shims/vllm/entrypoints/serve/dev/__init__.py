"""Routers of the development routes; each names its routes as the real one's `router.routes` do."""


class Route:
    def __init__(self, path, methods):
        self.path, self.methods = path, set(methods)


class Router:
    def __init__(self, *routes):
        self.routes = [Route(path, [method]) for method, path in routes]

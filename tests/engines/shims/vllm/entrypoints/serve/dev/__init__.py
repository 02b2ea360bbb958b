"""Routers of the development routes, decorated as the real ones are."""


class Route:
    def __init__(self, path, methods):
        self.path, self.methods = path, set(methods)


class APIRouter:
    def __init__(self):
        self.routes = []

    def post(self, path):
        return self._route(path, "POST")

    def get(self, path):
        return self._route(path, "GET")

    def _route(self, path, method):
        def take(function):
            self.routes.append(Route(path, [method]))
            return function

        return take

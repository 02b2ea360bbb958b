"""The route of decisions."""

ROUTE = "/v1/systemone"

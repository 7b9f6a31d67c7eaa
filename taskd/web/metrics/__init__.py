"""`/metrics`: the names and the text of metrics, the Grafana dashboard and the alert rules."""

"""`/metrics`: names, exposition, the Grafana dashboard and the alert rules."""

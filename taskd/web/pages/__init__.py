"""The pages of the dashboard: views, actions, rendering, charts and live data."""

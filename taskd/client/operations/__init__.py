"""What people do with a client to jobs, queues and workflows: cancel, change, complete, restart.

The client, the command line and the dashboard import this.
"""

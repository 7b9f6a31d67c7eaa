"""Operations on existing jobs, queues and workflows, such as cancel, change and restart.

The client, the command line and the dashboard import this.
"""

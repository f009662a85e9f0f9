"""Runs Dynamo's frontend with TCP_NODELAY, so that streams do not wait for the client's ACKs. It takes the arguments
of `python -m dynamo.frontend`.

Dynamo 1.6.1 serves HTTP without TCP_NODELAY. After the headers of a streamed reply, the server's kernel therefore
holds the first tokens until the client's kernel acknowledges the headers, which Linux delays by 40 ms, and sends
later tokens in groups. A connection inherits the option from the listening socket, so this program sets the option
there.
"""

import argparse
import os
import runpy
import socket
import stat
import threading
import time


def listening(port):
    """The sockets of this process that listen on this port."""
    for name in os.listdir("/proc/self/fd"):
        number = int(name)
        try:
            if not stat.S_ISSOCK(os.fstat(number).st_mode):
                continue
            found = socket.socket(fileno=os.dup(number))
        except OSError:
            continue
        with found:
            is_tcp = found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM
            if is_tcp and found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) and found.getsockname()[1] == port:
                yield found


def set_no_delay(port):
    while True:
        for found in listening(port):
            found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return
        time.sleep(0.1)


arguments = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
arguments.add_argument("--http-port", type=int, default=int(os.environ.get("DYN_HTTP_PORT", "8000")))
threading.Thread(target=set_no_delay, args=[arguments.parse_known_args()[0].http_port], daemon=True).start()
runpy.run_module("dynamo.frontend", run_name="__main__", alter_sys=True)

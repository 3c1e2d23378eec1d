"""HTTP/1.1: connections, requests, what responses are written with."""

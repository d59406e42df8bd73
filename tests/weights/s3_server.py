"""An S3 server of its own process: prints its port, and serves the folder it is given as s3://bucket/model.

    python s3_server.py FOLDER

It ends when its standard input does.
"""

import logging
import os
import sys
from pathlib import Path

os.environ |= {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_DEFAULT_REGION": "us-east-1",
}

import boto3
from moto.server import ThreadedMotoServer

logging.getLogger("werkzeug").setLevel(logging.ERROR)
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
_, port = server.get_host_and_port()
client = boto3.client("s3", endpoint_url=f"http://127.0.0.1:{port}")
client.create_bucket(Bucket="bucket")
for file in Path(sys.argv[1]).iterdir():
    client.upload_file(str(file), "bucket", f"model/{file.name}")
print(port, flush=True)
sys.stdin.read()
server.stop()

"""The model in LitServe, as its documentation shows it: `bench.lit_service MODEL PORT BATCH`."""

import base64
import os
import sys
from typing import Any

import litserve
import numpy as np


class Api(litserve.LitAPI):  # type: ignore[misc]
    """Decodes, batches and predicts in LitServe's worker process."""

    def setup(self, device: str) -> None:
        import vitrail

        self.single = int(os.environ["LIT_BATCH"]) == 1
        self.predictor: Any = vitrail.load(os.environ["LIT_MODEL"], device="cpu").predictor

    def decode_request(self, request: dict[str, str]) -> Any:
        return self.predictor.load(base64.b64decode(request["image"]))

    def batch(self, inputs: list[Any]) -> Any:
        return np.stack(inputs)

    def predict(self, x: Any) -> Any:
        return self.predictor.logits(x[None])[0] if self.single else self.predictor.logits(x)

    def unbatch(self, output: Any) -> list[Any]:
        return list(output)

    def encode_response(self, output: Any) -> dict[str, Any]:
        answer: dict[str, Any] = self.predictor.prediction(output, 1).to_dict()
        return answer


if __name__ == "__main__":
    os.environ["LIT_MODEL"], os.environ["LIT_BATCH"] = sys.argv[1], sys.argv[3]
    batch = int(sys.argv[3])
    api = Api(max_batch_size=batch, batch_timeout=0.01) if batch > 1 else Api()
    server = litserve.LitServer(api, accelerator="cpu")
    server.run(host="127.0.0.1", port=int(sys.argv[2]), generate_client_file=False)

"""`python -m bench.lit_service MODEL PORT`: the model in LitServe, as in its documentation."""

import base64
import os
import sys
from typing import Any

import litserve
import numpy as np

BATCH = 16


class Api(litserve.LitAPI):  # type: ignore[misc]
    """Decodes, batches and predicts in LitServe's worker process."""

    def setup(self, device: str) -> None:
        import vitrail

        self.predictor: Any = vitrail.load(os.environ["LIT_MODEL"], device="cpu").predictor

    def decode_request(self, request: dict[str, str]) -> Any:
        return self.predictor.load(base64.b64decode(request["image"]))

    def batch(self, inputs: list[Any]) -> Any:
        return np.stack(inputs)

    def predict(self, x: Any) -> Any:
        return self.predictor.logits(x)

    def unbatch(self, output: Any) -> list[Any]:
        return list(output)

    def encode_response(self, output: Any) -> dict[str, Any]:
        answer: dict[str, Any] = self.predictor.prediction(output, 1).to_dict()
        return answer


if __name__ == "__main__":
    os.environ["LIT_MODEL"] = sys.argv[1]
    server = litserve.LitServer(Api(max_batch_size=BATCH, batch_timeout=0.01), accelerator="cpu")
    server.run(host="127.0.0.1", port=int(sys.argv[2]), generate_client_file=False)

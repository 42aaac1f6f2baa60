# mypy: ignore-errors
"""A resources server of nemo-gym: PYTHON nemo_sums.py PORT."""

import sys

import uvicorn
from fastapi import FastAPI, Request
from nemo_gym.base_resources_server import (
    BaseResourcesServerConfig,
    BaseSeedSessionRequest,
    BaseSeedSessionResponse,
    BaseVerifyRequest,
    BaseVerifyResponse,
    SimpleResourcesServer,
)
from nemo_gym.server_utils import SESSION_ID_KEY, ServerClient
from omegaconf import OmegaConf
from pydantic import BaseModel


class Add(BaseModel):
    by: int


class Out(BaseModel):
    total: int


class S(SimpleResourcesServer):
    totals: dict = {}  # noqa: RUF012 (pydantic copies it)

    def setup_webserver(self) -> FastAPI:
        app = super().setup_webserver()
        app.post("/add")(self.add)
        return app

    async def seed_session(
        self, request: Request, body: BaseSeedSessionRequest
    ) -> BaseSeedSessionResponse:
        self.totals[request.session[SESSION_ID_KEY]] = 0
        return BaseSeedSessionResponse()

    async def add(self, request: Request, body: Add) -> Out:
        """Add to the total."""
        k = request.session[SESSION_ID_KEY]
        self.totals[k] += body.by
        return Out(total=self.totals[k])

    async def verify(self, request: Request, body: BaseVerifyRequest) -> BaseVerifyResponse:
        return BaseVerifyResponse(
            **body.model_dump(), reward=float(self.totals[request.session[SESSION_ID_KEY]] == 5)
        )


c = BaseResourcesServerConfig(
    host="127.0.0.1", port=int(sys.argv[1]), entrypoint="app.py", name="sums", domain="agent"
)
s = S(
    config=c,
    server_client=ServerClient.model_construct(
        head_server_config=None, global_config_dict=OmegaConf.create({})
    ),
)
uvicorn.run(s.setup_webserver(), host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")

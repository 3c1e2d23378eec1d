// The API reference: Swagger UI over /openapi.json. The key of the page at / is used where kept.

const KEY = "headrace.api-key";

declare const SwaggerUIBundle: (options: Record<string, unknown>) => unknown;

const key = localStorage.getItem(KEY) ?? sessionStorage.getItem(KEY) ?? "";

interface Asked {
  url: string;
  headers: Record<string, string>;
}

addEventListener("DOMContentLoaded", () =>
  SwaggerUIBundle({
    url: "openapi.json",
    domNode: document.getElementById("reference"),
    deepLinking: true,
    docExpansion: "list",
    defaultModelsExpandDepth: -1,
    persistAuthorization: true,
    validatorUrl: null,
    requestInterceptor: (request: Asked) => {
      if (key && !request.headers["Authorization"]) request.headers["Authorization"] = `Bearer ${key}`;
      return request;
    },
  }),
);
export {};

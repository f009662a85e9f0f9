//! `GET /openapi.json`: all routes, with schemas of requests and responses that are
//! derived from their types.

use std::sync::LazyLock;

use axum::Json;
use schemars::{JsonSchema, SchemaGenerator, generate::SchemaSettings};
use serde_json::{Map, Value, json};

use super::{
    anthropic::request::MessagesRequest,
    openai::{
        chat_chunks, chat_request::ChatFields, chat_whole::Completion, completion_choice,
        completion_request::CompletionFields, head::Answer, responses::request::Fields, sampling::Sampling,
    },
    other_process::{Drill, Taken},
    query::{OF_DEVICE, OF_MODEL, OF_SLEEP},
    tokens::{DetokenizeRequest, Detokenized, TokenizeFields, Tokenized},
};

pub(super) async fn document() -> Json<&'static Value> {
    static DOCUMENT: LazyLock<Value> = LazyLock::new(made);
    Json(&DOCUMENT)
}

/// OpenAPI 3.1 document with JSON Schema 2020-12.
fn made() -> Value {
    let settings =
        SchemaSettings::draft2020_12().with(|settings| settings.definitions_path = "/components/schemas".into());
    let mut pages = Pages { generator: settings.into_generator(), paths: Map::new() };
    let chat = json!({"allOf": [pages.schema::<ChatFields>(), pages.schema::<Sampling>()]});
    let (whole, chunk) = (pages.schema::<Completion<'_>>(), pages.schema::<Answer<'_, chat_chunks::Choice>>());
    pages.post("/v1/chat/completions", "Create a chat completion, whole or streamed", chat, whole, Some(chunk));
    let completion = json!({"allOf": [pages.schema::<CompletionFields>(), pages.schema::<Sampling>()]});
    let text = pages.schema::<Answer<'_, completion_choice::Choice>>();
    pages.post("/v1/completions", "Create a completion of a text or of tokens", completion, text.clone(), Some(text));
    let message = pages.schema::<MessagesRequest>();
    let (answer, count) = (json!({"type": "object"}), json!({"type": "object"}));
    pages.post(
        "/v1/messages",
        "Create a message (Anthropic API), whole or streamed",
        message.clone(),
        answer.clone(),
        Some(answer),
    );
    pages.post(
        "/v1/messages/count_tokens",
        "Count the prompt tokens of a message (Anthropic API)",
        message,
        count,
        None,
    );
    let (request, answer) = (pages.schema::<Fields>(), json!({"type": "object"}));
    pages.post(
        "/v1/responses",
        "Create a response (OpenAI API), whole, streamed or in the background",
        request,
        answer.clone(),
        Some(answer),
    );
    let text = json!({"allOf": [pages.schema::<TokenizeFields>(), {"required": ["prompt"]}]});
    let (request, answer) = (json!({"anyOf": [text, pages.schema::<ChatFields>()]}), pages.schema::<Tokenized>());
    pages.post("/tokenize", "Tokenize a text or a chat", request, answer, None);
    let (request, answer) = (pages.schema::<DetokenizeRequest>(), pages.schema::<Detokenized>());
    pages.post("/detokenize", "Convert tokens to text", request, answer, None);
    let (request, answer) = (pages.schema::<Drill>(), pages.schema::<Taken>());
    pages.post(
        "/v1/budget/other_process",
        "Drill on a host device: simulate another process that takes memory",
        request,
        answer,
        None,
    );
    for (path, summary) in [
        ("/v1/models", "List the models and their states"),
        ("/v1/models/{name}", "Get one model"),
        ("/v1/responses/{id}", "Get a stored response"),
        ("/v1/budget", "Device memory by class and model"),
        ("/v1/budget/other_process", "Bytes that the simulated process holds"),
        ("/v1/budget/events", "Device memory twice a second, and events, as server-sent events"),
        ("/events", "The latest events of device memory, as `bursar top` reads them"),
        ("/is_sleeping", "Whether the models sleep, and the sleep level of each"),
        ("/health", "Health check: 200 while all loaded models accept requests"),
        ("/health/ready", "Readiness check: the same as /health"),
        ("/health/live", "Liveness check: 200 while the process is alive"),
        ("/ping", "Liveness check: the same as /health/live"),
        ("/metrics", "Metrics in the Prometheus text format"),
        ("/version", "Version of the server"),
        ("/", "Chat page that also shows device memory"),
    ] {
        pages.bare(path, "get", summary);
    }
    pages.bare("/sleep", "post", "Put one model or all models to sleep at a level, as in vLLM");
    pages.bare("/wake_up", "post", "Wake one model or all models");
    pages.bare("/v1/responses/{id}", "delete", "Delete a stored response");
    pages.bare("/v1/responses/{id}/cancel", "post", "Cancel a background response");
    let schemas = pages.generator.take_definitions(true);
    json!({
        "openapi": "3.1.0",
        "info": {"title": "Bursar", "version": env!("CARGO_PKG_VERSION"), "license": {"name": "MIT OR Apache-2.0"}},
        "paths": pages.paths,
        "components": {"schemas": schemas, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{"key": []}, {}],
    })
}

/// Query parameters of the routes that have any.
const QUERIES: [(&[&str], &[&str]); 3] = [
    (&["/v1/budget", "/v1/budget/events", "/v1/budget/other_process"], OF_DEVICE),
    (&["/wake_up", "/is_sleeping"], OF_MODEL),
    (&["/sleep"], OF_SLEEP),
];

struct Pages {
    generator: SchemaGenerator,
    paths: Map<String, Value>,
}

impl Pages {
    fn schema<T: JsonSchema>(&mut self) -> Value {
        self.generator.subschema_for::<T>().to_value()
    }

    fn post(&mut self, path: &str, summary: &str, request: Value, answer: Value, streamed: Option<Value>) {
        let mut content = json!({"application/json": {"schema": answer}});
        if let Some(streamed) = streamed {
            content["text/event-stream"] = json!({"schema": streamed});
        }
        let operation = json!({
            "summary": summary,
            "requestBody": {"required": true, "content": {"application/json": {"schema": request}}},
            "responses": {"200": {"description": "Success", "content": content}, "default": error()},
        });
        self.add(path, "post", operation);
    }

    /// Adds a route without a request body, whose response has no schema.
    fn bare(&mut self, path: &str, method: &str, summary: &str) {
        let responses = json!({"200": {"description": "Success"}, "default": error()});
        self.add(path, method, json!({"summary": summary, "responses": responses}));
    }

    fn add(&mut self, path: &str, method: &str, operation: Value) {
        let methods = self.paths.entry(path).or_insert_with(|| json!({}));
        methods[method] = operation;
        let fields = QUERIES.iter().find(|(paths, _)| paths.contains(&path)).map_or(&[][..], |(_, fields)| fields);
        if !fields.is_empty() {
            let parameter = |name: &&str| {
                let kind = if *name == "model" { "string" } else { "integer" };
                json!({"name": name, "in": "query", "schema": {"type": kind}})
            };
            methods[method]["parameters"] = fields.iter().map(parameter).collect();
        }
        let names = path.split('/').filter_map(|part| part.strip_prefix('{')?.strip_suffix('}'));
        let named =
            names.map(|name| json!({"name": name, "in": "path", "required": true, "schema": {"type": "string"}}));
        let named: Vec<Value> = named.collect();
        if !named.is_empty() {
            methods["parameters"] = named.into();
        }
    }
}

/// Schema of an error in OpenAI's format.
fn error() -> Value {
    let text = json!({"type": ["string", "null"]});
    let fields = json!({"message": {"type": "string"}, "type": {"type": "string"}, "param": text, "code": text});
    let body = json!({"type": "object", "properties": {"error": {"type": "object", "properties": fields}}});
    json!({"description": "Error: what is wrong and what to change", "content": {"application/json": {"schema": body}}})
}

//! The chat template, which renders a conversation as text in the format that the
//! model was trained on.
//!
//! Templates are Jinja2 with the settings of transformers (`utils/chat_template_utils.py`, 5.17):
//! blocks are trimmed, and templates can use loop controls, `raise_exception`, `strftime_now` and a
//! `tojson` without HTML escapes. `{% generation %}` tags have no effect.

use std::collections::BTreeMap;
use std::error::Error as _;
use std::io;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::Serde;
use minijinja::{AutoEscape, Environment, Error, ErrorKind, UndefinedBehavior, Value};
use serde_json::json;

use super::error::{PrivateText, TextError};
use super::final_turn::{ContinueError, FinalTurn};
use super::message::{ContentForm, ContentPart, Formed, Message, Role};
use super::python_value::display;
use super::reply_format::ReplyFormat;
use super::special_guard::SpecialGuard;
use super::strftime::strftime;
use super::template_meter::{MeterLimits, SizeLimitExceeded};
use super::template_metering::metered;
use super::template_source::{DEFAULT_TEMPLATE, TemplateSources};

/// Limits on compiling and rendering a template.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TemplateLimits {
    /// Maximum instructions of the template engine.
    pub steps_max: u64,
    /// Maximum bytes of the rendered prompt.
    pub bytes_max: usize,
    /// Maximum bytes of all templates' sources together.
    pub source_bytes_max: usize,
    /// Maximum bytes of one value, including nested values.
    pub value_bytes_max: u64,
    /// Maximum bytes of all values created while rendering. This limits the host
    /// memory that rendering takes.
    pub values_bytes_max: u64,
}

/// Reasons for the default values:
///
/// - `steps_max`: a turn takes about 50 steps, so 5 million steps are far more than any
///   conversation needs. They take under a second, unless each step reads megabytes (comparing long
///   texts, searching long lists). No limit here counts such reads.
/// - `source_bytes_max`: the longest released template has 20 KB.
/// - `value_bytes_max`: a text of 4 MiB has about a million tokens.
/// - `values_bytes_max`: a text that grows to one megabyte over a thousand turns creates 500 MB of
///   values.
impl Default for TemplateLimits {
    fn default() -> Self {
        TemplateLimits {
            steps_max: 5_000_000,
            bytes_max: 16 << 20,
            source_bytes_max: 256 << 10,
            value_bytes_max: 4 << 20,
            values_bytes_max: 512 << 20,
        }
    }
}

/// Maximum recursion depth of macros and loops, as minijinja counts it: a macro call
/// counts as four levels.
const RECURSION_MAX: usize = 200;
/// Stack size of the thread that compiles templates. A template that consists only of operators or
/// branches is nested as deep as it is long, and the parser and the compiler recurse through all of
/// it. The stack is only reserved; a released template uses a few kilobytes.
const COMPILE_STACK_BYTES: usize = 128 << 20;

/// The inputs of a template in addition to the messages.
#[derive(Clone, Debug, PartialEq)]
pub struct TemplateInputs {
    /// Whether to end the text with the beginning of the model's turn.
    pub add_generation_prompt: bool,
    /// Whether to end the text where the model's last turn ends, so that the reply continues that
    /// turn. Cannot be combined with `add_generation_prompt`.
    pub continue_final_message: bool,
    /// JSON schemas of the functions that the model may call.
    pub tools: Option<Vec<serde_json::Value>>,
    /// Further variables, such as `enable_thinking`.
    pub variables: serde_json::Map<String, serde_json::Value>,
    /// The time for `strftime_now`: seconds since 1970, shifted to the user's time zone.
    pub now_unix_seconds: i64,
    /// The template's name, if the checkpoint has several templates. `None` selects "tool_use" if
    /// there are tools and the checkpoint has this template, and otherwise "default".
    pub template: Option<String>,
}

/// Inputs for a prompt that begins a reply, without tools, at 1970-01-01.
impl Default for TemplateInputs {
    fn default() -> Self {
        TemplateInputs {
            add_generation_prompt: true,
            continue_final_message: false,
            tools: None,
            variables: serde_json::Map::new(),
            now_unix_seconds: 0,
            template: None,
        }
    }
}

/// All roles. `User` is first, because each other role is tested together with a user message.
const ROLES: [Role; 4] = [Role::User, Role::System, Role::Assistant, Role::Tool];

/// A checkpoint's compiled chat templates.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    sources: TemplateSources,
    limits: TemplateLimits,
    /// By template name: the form in which the template reads the contents of each of [`ROLES`].
    forms: BTreeMap<String, [ContentForm; ROLES.len()]>,
    /// Whether any template refuses call ids that do not have nine characters, as Mistral's
    /// templates do.
    has_short_ids: bool,
}

impl ChatTemplate {
    /// Compiles all templates of `sources`.
    ///
    /// # Errors
    /// [`TextError::TemplateSource`] or [`TextError::TemplateSourceBytes`].
    pub fn new(sources: TemplateSources, limits: TemplateLimits) -> Result<Self, TextError> {
        let bytes = sources.templates.values().map(String::len).sum();
        if bytes > limits.source_bytes_max {
            return Err(TextError::TemplateSourceBytes { bytes, bytes_max: limits.source_bytes_max });
        }
        let deep = std::thread::Builder::new().stack_size(COMPILE_STACK_BYTES);
        let compiled = deep.spawn(move || ChatTemplate::compile(sources, limits)).map(std::thread::JoinHandle::join);
        let unknown = || TextError::TemplateSource { line: 0, kind: "the compiler could not run".into() };
        compiled.map_err(|_| unknown())?.map_err(|_| unknown())?
    }

    fn compile(sources: TemplateSources, limits: TemplateLimits) -> Result<Self, TextError> {
        let refused = |error: Error| TextError::TemplateSource {
            line: error.line().unwrap_or(0),
            kind: match error.detail() {
                // The detail quotes only the template's source, which does not come from a user.
                Some(detail) => format!("{}, {detail}", error.kind()),
                None => error.kind().to_string(),
            },
        };
        let meter = MeterLimits { value_bytes_max: limits.value_bytes_max, total_bytes_max: limits.values_bytes_max };
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        let syntax = syntax.map_err(refused)?;
        environment.set_syntax(syntax.clone());
        environment.set_recursion_limit(RECURSION_MAX);
        // The behavior of Jinja2's default: an undefined name prints nothing and is false, and
        // reading its attributes is an error.
        environment.set_undefined_behavior(UndefinedBehavior::Lenient);
        environment.set_debug(false); // otherwise errors quote the messages
        environment.set_fuel(Some(limits.steps_max));
        environment.set_auto_escape_callback(|_| AutoEscape::None);
        environment.set_formatter(move |output, state, value| {
            let text = display(value);
            // The text counts as a value, because a block may capture it.
            meter.add(state, text.len() as u64)?;
            output.write_str(&text).map_err(|_| Error::from(ErrorKind::WriteFailure))
        });
        meter.install(&mut environment);
        environment.set_unknown_method_callback(move |state, value, method, arguments| {
            meter.method(state, value, method, arguments)
        });
        environment.add_function("raise_exception", |reason: String| -> Result<Value, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, "raise_exception").with_source(Raised(reason)))
        });
        for (name, source) in &sources.templates {
            let plain = with_plain_tags(source);
            // Errors of `metered` refer to the original source.
            let metered = metered(&plain, &syntax).map_err(refused)?;
            environment.add_template_owned(name.clone(), metered).map_err(refused)?;
        }
        let has_short_ids = sources.templates.values().any(|source| source.contains("length != 9"));
        let mut template = ChatTemplate { environment, sources, limits, forms: BTreeMap::new(), has_short_ids };
        let names = template.sources.templates.keys();
        template.forms = names.map(|name| (name.clone(), template.content_forms(name))).collect();
        Ok(template)
    }

    pub fn sources(&self) -> &TemplateSources {
        &self.sources
    }

    /// The formats in which the model writes reasoning and calls, according to the source of the
    /// template that `inputs` select.
    ///
    /// # Errors
    /// [`TextError::NoTemplate`]; [`TextError::UnknownTemplate`].
    pub fn reply_format(&self, inputs: &TemplateInputs) -> Result<ReplyFormat, TextError> {
        self.source(inputs).map(ReplyFormat::of_template)
    }

    /// Whether the template that `inputs` select shows tools to the model.
    ///
    /// # Errors
    /// [`TextError::NoTemplate`]; [`TextError::UnknownTemplate`].
    pub fn shows_tools(&self, inputs: &TemplateInputs) -> Result<bool, TextError> {
        self.source(inputs).map(|source| source.contains("tools"))
    }

    fn source(&self, inputs: &TemplateInputs) -> Result<&str, TextError> {
        let name = self.select(inputs)?;
        self.sources.templates.get(name).map(String::as_str).ok_or_else(|| self.unknown(name))
    }

    /// Determines the form in which the template of this name reads the contents of each role, by
    /// trying strings and lists of parts.
    fn content_forms(&self, name: &str) -> [ContentForm; ROLES.len()] {
        let Some(user) = self.content_form(name, Role::User, ContentForm::String) else {
            return [ContentForm::String; ROLES.len()];
        };
        // A role that the template refuses gets the user's form.
        ROLES.map(|role| match role {
            Role::User => user,
            role => self.content_form(name, role, user).unwrap_or(user),
        })
    }

    /// The form in which the template reads the content of `role`, tested together with user
    /// messages in the form `user`. `None` if the template shows neither strings nor lists.
    fn content_form(&self, name: &str, role: Role, user: ContentForm) -> Option<ContentForm> {
        const TEXTS: [&str; 2] = ["told-first", "told-then"];
        let parts = |texts: &[&str]| {
            texts.iter().map(|text| json!({"type": "text", "text": text})).collect::<serde_json::Value>()
        };
        let asked = if user == ContentForm::Parts { parts(&["ask"]) } else { json!("ask") };
        let asked = json!({"role": "user", "content": asked});
        let call = json!({"id": "call00001", "type": "function", "function": {"name": "f", "arguments": {"x": "y"}}});
        let render = |content: serde_json::Value| {
            let tried = json!({"role": role, "content": content});
            let messages = match role {
                Role::User => json!([tried]),
                Role::System => json!([tried, asked]),
                Role::Assistant => json!([asked, tried, asked]),
                Role::Tool => {
                    let mut tried = tried;
                    (tried["name"], tried["tool_call_id"]) = (json!("f"), json!("call00001"));
                    json!([asked, {"role": "assistant", "content": "", "tool_calls": [call]}, tried])
                }
            };
            let inputs = TemplateInputs { template: Some(name.to_owned()), ..TemplateInputs::default() };
            self.render_json(&messages, &inputs).unwrap_or_default()
        };
        let in_parts = render(parts(&TEXTS));
        let is_printed = |text: &str| ['\'', '"'].iter().any(|mark| in_parts.contains(&format!("{mark}{text}{mark}")));
        let reads_parts = TEXTS.iter().all(|text| in_parts.contains(text) && !is_printed(text));
        match (reads_parts, render(json!(TEXTS[0])).contains(TEXTS[0])) {
            (true, true) => Some(ContentForm::Either),
            (true, false) => Some(ContentForm::Parts),
            (false, true) => Some(ContentForm::String),
            (false, false) => None,
        }
    }

    /// Renders a conversation. Each message's content has the form that the template reads. Several
    /// texts become separate lines of one string if the template reads only strings, and separate
    /// parts of a list if it reads only lists. If it reads both, they become one string without
    /// separators, or parts of a list if the message has pictures or videos. This function does
    /// *not* guard against names of special tokens in messages;
    /// [`PromptEncoder`](super::PromptEncoder) does.
    ///
    /// # Errors
    /// [`TextError::NoTemplate`]; [`TextError::UnknownTemplate`];
    /// [`TextError::TemplateRefused`] with the template's message; [`TextError::Template`];
    /// [`TextError::TemplateSteps`], [`TextError::TemplateBytes`] or
    /// [`TextError::TemplateMemory`] over a limit; [`TextError::Continue`].
    pub fn render(&self, messages: &[Message], inputs: &TemplateInputs) -> Result<String, TextError> {
        if self.has_short_ids && messages.iter().any(Message::has_long_ids) {
            let messages: Vec<_> = messages.iter().map(Message::with_short_ids).collect();
            return self.render(&messages, inputs);
        }
        let forms = self.forms.get(self.select(inputs)?);
        let form = |role| {
            forms.map_or(ContentForm::Either, |forms| forms[ROLES.iter().position(|of| *of == role).unwrap_or(0)])
        };
        let formed: Vec<_> = messages.iter().map(|message| Formed::new(message, form(message.role))).collect();
        if inputs.continue_final_message {
            return self.render_continued(json!(formed), inputs);
        }
        self.render_values(Value::from(Serde(&formed[..])), inputs)
    }

    /// Whether the default template reads contents in parts and writes `placeholder` for a picture.
    /// Other templates concatenate strings, and either fail on a list of parts or print the list.
    pub fn knows_pictures(&self, placeholder: &str) -> bool {
        const TEXT: &str = "told";
        let parts = Message { role: Role::User, content: vec![ContentPart::Image, ContentPart::Text(TEXT.to_owned())] };
        let rendered = self.render(&[parts], &TemplateInputs::default());
        rendered.is_ok_and(|text| text.contains(TEXT) && text.contains(placeholder))
    }

    /// Same as [`render`](Self::render), with messages as JSON, for fields that
    /// [`Message`] does not have.
    ///
    /// # Errors
    /// Same as [`render`](Self::render).
    pub fn render_json(&self, messages: &serde_json::Value, inputs: &TemplateInputs) -> Result<String, TextError> {
        if inputs.continue_final_message {
            return self.render_continued(messages.clone(), inputs);
        }
        self.render_values(Value::from(Serde(messages)), inputs)
    }

    fn render_continued(&self, mut messages: serde_json::Value, inputs: &TemplateInputs) -> Result<String, TextError> {
        if inputs.add_generation_prompt {
            return Err(ContinueError::BeginsAnother.into());
        }
        let mut texts = Vec::new();
        let written = inputs.tools.iter().flatten().chain(inputs.variables.values()).chain([&messages]);
        written.for_each(|value| collect_json(value, &mut texts));
        texts.extend(self.sources.templates.values().map(String::as_str));
        let mark = SpecialGuard::unused_mark(texts.iter().copied());
        let mark = mark.ok_or(TextError::Encode { bytes: texts.iter().map(|text| text.len()).sum() })?;
        let turn = FinalTurn::tagging(&mut messages, mark)?;
        Ok(turn.cut(self.render_values(Value::from(Serde(messages)), inputs)?)?)
    }

    fn render_values(&self, messages: Value, inputs: &TemplateInputs) -> Result<String, TextError> {
        let name = self.select(inputs)?;
        let unknown = |_| self.unknown(name);
        let template = self.environment.get_template(name).map_err(unknown)?;
        let mut rendered = LimitedText { bytes: Vec::new(), bytes_max: self.limits.bytes_max, overflowed: false };
        let outcome = template.render_captured_to(self.context(messages, inputs), &mut rendered).map(|_| ());
        match outcome {
            Ok(()) => String::from_utf8(rendered.bytes).map_err(|_| TextError::Template {
                line: 0,
                kind: "the output is not UTF-8".into(),
                reason: PrivateText(String::new()),
            }),
            Err(_) if rendered.overflowed => Err(TextError::TemplateBytes { bytes_max: self.limits.bytes_max }),
            Err(error) => Err(self.failure(&error)),
        }
    }

    fn select<'a>(&'a self, inputs: &'a TemplateInputs) -> Result<&'a str, TextError> {
        let has = |name: &str| self.sources.templates.contains_key(name);
        match &inputs.template {
            Some(name) if has(name) => Ok(name),
            Some(name) => Err(self.unknown(name)),
            None if inputs.tools.is_some() && has("tool_use") => Ok("tool_use"),
            None => Ok(DEFAULT_TEMPLATE),
        }
    }

    fn unknown(&self, name: &str) -> TextError {
        let known: Vec<_> = self.sources.templates.keys().map(String::as_str).collect();
        if known.is_empty() {
            TextError::NoTemplate
        } else {
            TextError::UnknownTemplate { name: name.to_owned(), known: known.join(", ") }
        }
    }

    fn context(&self, messages: Value, inputs: &TemplateInputs) -> Value {
        let now = inputs.now_unix_seconds;
        // The variable `tools` is left out if there are no tools: see
        // `template_metering::OPTIONAL`.
        let tools = inputs.tools.as_ref().map(|tools| ("tools", Value::from(Serde(tools))));
        let own = [
            ("messages", messages),
            ("add_generation_prompt", Value::from(inputs.add_generation_prompt)),
            ("strftime_now", Value::from_function(move |format: String| strftime(&format, now))),
        ];
        let special =
            self.sources.special_tokens.iter().map(|(name, token)| (name.clone(), Value::from(token.as_str())));
        let variables = inputs.variables.iter().map(|(name, value)| (name.clone(), Value::from(Serde(value))));
        Value::from_pairs(
            special.chain(variables).chain(own.into_iter().chain(tools).map(|(name, value)| (name.to_owned(), value))),
        )
    }

    fn failure(&self, error: &Error) -> TextError {
        let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
        let mut line = 0;
        while let Some(inner) = cause {
            if let Some(Raised(reason)) = inner.downcast_ref() {
                return TextError::TemplateRefused { line, reason: PrivateText(reason.clone()) };
            }
            if let Some(error) = inner.downcast_ref::<Error>() {
                line = error.line().unwrap_or(line);
                if let Some(heavy) = error.source().and_then(|source| source.downcast_ref::<SizeLimitExceeded>()) {
                    return TextError::TemplateMemory { line, bytes_max: heavy.bytes_max };
                }
                if error.kind() == ErrorKind::OutOfFuel {
                    return TextError::TemplateSteps { steps_max: self.limits.steps_max };
                }
            }
            cause = inner.source();
        }
        TextError::Template {
            line: error.line().unwrap_or(0),
            kind: error.kind().to_string(),
            reason: PrivateText(error.detail().unwrap_or_default().to_owned()),
        }
    }
}

/// Adds every text in `value` to `texts`.
pub(super) fn collect_json<'a>(value: &'a serde_json::Value, texts: &mut Vec<&'a str>) {
    match value {
        serde_json::Value::String(text) => texts.push(text),
        serde_json::Value::Array(items) => items.iter().for_each(|item| collect_json(item, texts)),
        serde_json::Value::Object(map) => map.iter().for_each(|(key, value)| {
            texts.push(key);
            collect_json(value, texts);
        }),
        _ => {}
    }
}

/// The text that a template passed to `raise_exception`.
#[derive(Debug)]
struct Raised(String);

impl std::fmt::Display for Raised {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("raise_exception")
    }
}

impl std::error::Error for Raised {}

struct LimitedText {
    bytes: Vec<u8>,
    bytes_max: usize,
    overflowed: bool,
}

impl io::Write for LimitedText {
    fn write(&mut self, piece: &[u8]) -> io::Result<usize> {
        if self.bytes.len() + piece.len() > self.bytes_max {
            self.overflowed = true;
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        self.bytes.extend_from_slice(piece);
        Ok(piece.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Replaces `{% generation %}` .. `{% endgeneration %}`, which transformers uses for training, with
/// a block that always runs, and keeps line breaks after `{% raw %}`.
fn with_plain_tags(source: &str) -> String {
    let mut plain = String::with_capacity(source.len());
    let mut rest = source;
    while let Some((before, tag_on)) = rest.split_once("{%") {
        plain.push_str(before);
        plain.push_str("{%");
        let Some((tag, after)) = tag_on.split_once("%}") else {
            rest = tag_on;
            break;
        };
        let replaced = match tag.trim_matches(|char: char| char.is_whitespace() || char == '-' || char == '+') {
            "generation" => tag.replace("generation", "if true"),
            "endgeneration" => tag.replace("endgeneration", "endif"),
            // Jinja2 keeps a line break after `{% raw %}`, although it trims blocks.
            "raw" if !tag.ends_with(['-', '+']) => tag.to_owned() + "+",
            _ => tag.to_owned(),
        };
        plain.push_str(&replaced);
        plain.push_str("%}");
        rest = after;
    }
    plain.push_str(rest);
    plain
}

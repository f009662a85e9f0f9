//! Rewrites a template so that every value it makes is weighed, and its operators do as Jinja2's.
//!
//! minijinja counts steps, but a step may double a text, and forty of those fill any machine. Its
//! operators cannot be hooked, so the source is changed: `a + b` becomes `(a + b)|meter`, and so
//! on. minijinja's own parser gives the places. Text is inserted on the same lines, so that errors
//! keep their line numbers.

use minijinja::machinery::ast::{BinOpKind, CallArg, Expr, Slice, Stmt, UnaryOpKind};
use minijinja::machinery::{Token, tokenize};
use minijinja::syntax::SyntaxConfig;
use minijinja::{Error, ErrorKind};

/// The filter that weighs a value.
pub(super) const METER: &str = "__bursar_meter";
/// The filter that weighs a value assigned to a namespace's attribute. A namespace must
/// not hold another one.
pub(super) const KEEP: &str = "__bursar_keep";
/// The filter that multiplies.
pub(super) const TIMES: &str = "__bursar_times";
/// The filter for the operator `%`, which also formats texts.
pub(super) const PERCENT: &str = "__bursar_percent";
/// The filter for slices.
pub(super) const SLICE: &str = "__bursar_slice";
/// The filter that makes text of an operand of `~`.
pub(super) const SHOWN: &str = "__bursar_shown";
/// The filter that makes `None` of an undefined value.
pub(super) const ABSENT: &str = "__bursar_absent";
/// The function that weighs a number of bytes of the template's own text.
pub(super) const TEXT: &str = "__bursar_text";

/// Variables that a request may lack. They are undefined then, so that lengths and loops work, and
/// they are also `none` in comparisons, as transformers passes them.
pub(super) const OPTIONAL: [&str; 2] = ["tools", "documents"];

/// Filters whose texts Jinja2 does not escape again.
const SAFE: [&str; 4] = ["safe", "e", "escape", "forceescape"];

/// Maximum levels of nested statements and expressions. Released templates have about ten; without
/// a limit a long one would exhaust the stack.
const DEPTH_MAX: usize = 500;

/// In a chain of sums, every eighth and the last are weighed. Between them the values may briefly
/// exceed the limit by a few.
const SUMS_UNWEIGHED: usize = 8;

/// Rewrites a template.
///
/// # Errors
/// The parser's errors, and an error for text that cannot be weighed: another template
/// inside this one (which transformers does not support either), and `{% raw %}` inside text
/// that becomes a value.
pub(super) fn metered(source: &str, syntax: &SyntaxConfig) -> Result<String, Error> {
    let source = &without_unary_plus(source, syntax)?;
    let template = minijinja::machinery::parse(source, "", syntax.clone())?;
    let mut metering = Metering { source, edits: Vec::new(), captures: 0, depth: 0, refused: None };
    metering.statement(&template);
    match metering.refused {
        Some(what) => Err(Error::new(ErrorKind::SyntaxError, what)),
        None => Ok(metering.apply()),
    }
}

/// Text that replaces `bytes` bytes at an offset.
struct Edit {
    at: usize,
    bytes: usize,
    text: String,
}

struct Metering<'a> {
    source: &'a str,
    /// Inner expressions come before outer ones that end at the same place.
    edits: Vec<Edit>,
    /// Number of enclosing blocks whose text becomes a value.
    captures: usize,
    /// Number of enclosing statements and expressions.
    depth: usize,
    refused: Option<&'static str>,
}

impl Metering<'_> {
    fn apply(mut self) -> String {
        self.edits.sort_by_key(|edit| edit.at); // stable
        let mut rewritten = String::with_capacity(self.source.len() * 2);
        let mut from = 0;
        for edit in &self.edits {
            rewritten.push_str(&self.source[from..edit.at]);
            rewritten.push_str(&edit.text);
            from = edit.at + edit.bytes;
        }
        rewritten.push_str(&self.source[from..]);
        rewritten
    }

    /// Offset of an expression's first byte. The parser's spans of postfix expressions (`.a`,
    /// `[0]`, `|f`) begin after their operand, and those of comparisons and choices before it,
    /// at the last token.
    fn start(&self, expression: &Expr<'_>) -> usize {
        let own = expression.span().start_offset as usize;
        let first = match expression {
            Expr::Compare(compare) => return self.start(&compare.expr),
            Expr::IfExpr(choice) => return self.start(&choice.true_expr),
            Expr::BinOp(operation) if is_comparison(&operation.op) => return self.start(&operation.left),
            Expr::UnaryOp(operation) if matches!(operation.op, UnaryOpKind::Not) => {
                // `a not in b` and `a is not b` have the operator inside.
                return if self.source[own..].starts_with("not") { own } else { self.start(&operation.expr) };
            }
            Expr::Slice(slice) => Some(&slice.expr),
            Expr::Filter(filter) => filter.expr.as_ref(),
            Expr::Test(test) => Some(&test.expr),
            Expr::GetAttr(attribute) => Some(&attribute.expr),
            Expr::GetItem(item) => Some(&item.expr),
            Expr::Call(call) => Some(&call.expr),
            _ => None,
        };
        first.map_or(own, |first| own.min(self.start(first)))
    }

    fn insert(&mut self, at: usize, text: impl Into<String>) {
        self.edits.push(Edit { at, bytes: 0, text: text.into() });
    }

    /// Puts parentheses around an expression, a filter after them, and parentheses around both, as
    /// `[0]` may follow. If the expression begins with parentheses of its own, the new ones may end
    /// up inside them, which means the same.
    fn filter(&mut self, expression: &Expr<'_>, filter: &str) {
        let start = self.start(expression);
        self.insert(start, "((");
        self.insert(end(expression), format!(")|{filter})"));
    }

    fn statements(&mut self, statements: &[Stmt<'_>]) {
        statements.iter().for_each(|statement| self.statement(statement));
    }

    fn captured(&mut self, statements: &[Stmt<'_>]) {
        self.captures += 1;
        self.statements(statements);
        self.captures -= 1;
    }

    fn statement(&mut self, statement: &Stmt<'_>) {
        self.depth += 1;
        match statement {
            _ if self.is_too_deep() => {}
            Stmt::Template(template) => self.statements(&template.children),
            Stmt::EmitExpr(emit) => self.expression(&emit.expr),
            // Printed text is limited when it is printed. Captured text becomes a value.
            Stmt::EmitRaw(emit) if self.captures > 0 && !emit.raw.is_empty() => {
                let at = emit.raw.as_ptr() as usize - self.source.as_ptr() as usize;
                if is_raw_tag(&self.source[..at]) {
                    self.refused = Some("raw text inside what becomes a value");
                }
                self.insert(at, format!("{{{{ {TEXT}({}) }}}}", emit.raw.len()));
            }
            Stmt::EmitRaw(_) | Stmt::Continue(_) | Stmt::Break(_) => {}
            Stmt::ForLoop(each) => {
                self.expression(&each.iter);
                each.filter_expr.iter().for_each(|filter| self.expression(filter));
                // A call of a recursive loop returns the text that its body prints.
                if each.recursive {
                    self.captured(&each.body)
                } else {
                    self.statements(&each.body)
                }
                self.statements(&each.else_body);
            }
            Stmt::IfCond(condition) => {
                self.expression(&condition.expr);
                self.statements(&condition.true_body);
                self.statements(&condition.false_body);
            }
            Stmt::WithBlock(with) => {
                with.assignments.iter().for_each(|(_, value)| self.expression(value));
                self.statements(&with.body);
            }
            Stmt::Set(set) => {
                self.expression(&set.expr);
                if matches!(set.target, Expr::GetAttr(_)) {
                    self.filter(&set.expr, KEEP);
                }
            }
            Stmt::SetBlock(set) => {
                set.filter.iter().for_each(|filter| self.arguments_of_filters(filter));
                self.captured(&set.body);
            }
            Stmt::FilterBlock(block) => {
                self.arguments_of_filters(&block.filter);
                self.captured(&block.body);
            }
            Stmt::AutoEscape(block) => self.statements(&block.body),
            Stmt::Block(block) => self.captured(&block.body),
            Stmt::Macro(declared) => {
                declared.defaults.iter().for_each(|default| self.expression(default));
                self.captured(&declared.body);
            }
            Stmt::CallBlock(block) => {
                self.arguments(&block.call.args);
                block.macro_decl.defaults.iter().for_each(|default| self.expression(default));
                self.captured(&block.macro_decl.body);
            }
            Stmt::Do(call) => self.arguments(&call.call.args),
            Stmt::Import(_) | Stmt::FromImport(_) | Stmt::Extends(_) | Stmt::Include(_) => {
                self.refused = Some("another template inside this one");
            }
        }
        self.depth -= 1;
    }

    fn is_too_deep(&mut self) -> bool {
        if self.depth > DEPTH_MAX {
            self.refused = Some("statements or expressions too deep in each other");
        }
        self.refused.is_some()
    }

    /// `{% filter a|b(c) %}`: the innermost filter has no operand in the source.
    fn arguments_of_filters(&mut self, filter: &Expr<'_>) {
        if let Expr::Filter(filter) = filter {
            filter.expr.iter().for_each(|inner| self.arguments_of_filters(inner));
            self.arguments(&filter.args);
        }
    }

    fn arguments(&mut self, arguments: &[CallArg<'_>]) {
        for argument in arguments {
            match argument {
                CallArg::Pos(value)
                | CallArg::Kwarg(_, value)
                | CallArg::PosSplat(value)
                | CallArg::KwargSplat(value) => {
                    self.expression(value);
                }
            }
        }
    }

    fn expression(&mut self, expression: &Expr<'_>) {
        self.operand(expression, false);
    }

    /// Visits an expression; `is_of_sum` if it is the left operand of a sum.
    fn operand(&mut self, expression: &Expr<'_>, is_of_sum: bool) {
        self.depth += 1;
        self.parts(expression);
        // Weighing each sum of a long chain would nest it in one more pair of parentheses, and the
        // parser allows few levels.
        if self.refused.is_none() && (!is_of_sum || sums(expression).is_multiple_of(SUMS_UNWEIGHED)) {
            self.whole(expression);
        }
        self.depth -= 1;
    }

    /// Visits the parts of an expression.
    fn parts(&mut self, expression: &Expr<'_>) {
        match expression {
            _ if self.is_too_deep() => {}
            Expr::Var(_) | Expr::Const(_) => {}
            Expr::Slice(slice) => {
                self.expression(&slice.expr);
                [&slice.start, &slice.stop, &slice.step].into_iter().flatten().for_each(|part| self.expression(part));
            }
            Expr::UnaryOp(operation) => self.expression(&operation.expr),
            Expr::BinOp(operation) => {
                self.operand(&operation.left, is_sum(operation.op));
                self.expression(&operation.right);
                if is_comparison(&operation.op) {
                    self.none_compared(&[&operation.left, &operation.right]);
                }
                // `+` with a `|safe` text escapes the other text, as Python's `Markup` does.
                match (matches!(operation.op, BinOpKind::Add), is_safe(&operation.left), is_safe(&operation.right)) {
                    (true, true, false) => self.filter(&operation.right, "escape"),
                    (true, false, true) => self.filter(&operation.left, "escape"),
                    _ => {}
                }
                if matches!(operation.op, BinOpKind::Concat) {
                    [&operation.left, &operation.right].into_iter().for_each(|operand| self.shown(operand));
                }
            }
            Expr::Compare(compare) => {
                let others = compare.ops.iter().map(|operation| &operation.expr);
                let operands: Vec<_> = std::iter::once(&compare.expr).chain(others).collect();
                operands.iter().for_each(|operand| self.expression(operand));
                self.none_compared(&operands);
            }
            Expr::IfExpr(choice) => {
                self.expression(&choice.test_expr);
                self.expression(&choice.true_expr);
                choice.false_expr.iter().for_each(|otherwise| self.expression(otherwise));
            }
            Expr::Filter(filter) => {
                filter.expr.iter().for_each(|inner| self.expression(inner));
                self.arguments(&filter.args);
            }
            Expr::Test(test) => {
                self.expression(&test.expr);
                self.arguments(&test.args);
                let is_of_none = matches!(test.name, "eq" | "equalto" | "ne" | "sameas" | "==" | "!=")
                    && test.args.iter().any(|argument| matches!(argument, CallArg::Pos(value) if is_none(value)));
                if test.name == "none" || is_of_none {
                    self.absent(&test.expr);
                }
            }
            Expr::GetAttr(attribute) => self.expression(&attribute.expr),
            Expr::GetItem(item) => {
                self.expression(&item.expr);
                self.expression(&item.subscript_expr);
            }
            Expr::Call(call) => {
                self.expression(&call.expr);
                self.arguments(&call.args);
                // minijinja divides by the number of arguments of `loop.cycle`.
                let has_items = matches!(call.args.first(), Some(CallArg::Pos(_)));
                if matches!(&call.expr, Expr::GetAttr(attribute) if attribute.name == "cycle") && !has_items {
                    self.refused = Some("a cycle without items");
                }
            }
            Expr::List(list) => list.items.iter().for_each(|item| self.expression(item)),
            Expr::Tuple(tuple) => tuple.items.iter().for_each(|item| self.expression(item)),
            Expr::Map(map) => map.keys.iter().chain(&map.values).for_each(|part| self.expression(part)),
        }
    }

    /// Weighs the value that an expression makes, if it makes one.
    fn whole(&mut self, expression: &Expr<'_>) {
        match expression {
            Expr::Slice(slice) => self.slice(slice, end(expression)),
            // The limit on the source covers constants.
            Expr::List(_) | Expr::Tuple(_) | Expr::Map(_) if expression.as_const().is_none() => {
                self.filter(expression, METER);
            }
            Expr::BinOp(operation) => match operation.op {
                kind if is_sum(kind) => self.filter(expression, METER),
                BinOpKind::Mul | BinOpKind::Rem => {
                    let (sign, filter) =
                        if matches!(operation.op, BinOpKind::Mul) { ("*", TIMES) } else { ("%", PERCENT) };
                    let start = self.start(expression);
                    self.insert(start, "(");
                    self.replace(sign, end(&operation.left), format!(")|{filter}("));
                    self.insert(end(expression), ")");
                }
                _ => {}
            },
            _ => {}
        }
    }

    /// Replaces the first `sign` after a place, where nothing but parentheses and
    /// blanks is before it.
    fn replace(&mut self, sign: &str, after: usize, text: String) -> usize {
        let at = after + self.source[after..].find(sign).expect("the sign follows");
        self.edits.push(Edit { at, bytes: sign.len(), text });
        at + sign.len()
    }

    /// `a[b:c:d]` becomes `((a)|slice(b, c, d))`.
    fn slice(&mut self, slice: &Slice<'_>, slice_end: usize) {
        let start = self.start(&slice.expr);
        self.insert(start, "((");
        let mut at = self.replace("[", end(&slice.expr), format!(")|{SLICE}("));
        let bounds = [&slice.start, &slice.stop, &slice.step];
        for (number, bound) in bounds.into_iter().enumerate() {
            match bound {
                Some(bound) => at = end(bound),
                None => self.insert(at, "none"),
            }
            // The bound may be in parentheses.
            let rest = self.source[at..].trim_start_matches(|char: char| char == ')' || char.is_whitespace());
            at = self.source.len() - rest.len();
            match number {
                2 => {}
                1 if !rest.starts_with(':') => self.insert(at, ","),
                _ => at = self.replace(":", at, ",".to_owned()),
            }
        }
        self.edits.push(Edit { at: slice_end - 1, bytes: 1, text: "))".to_owned() });
    }

    /// An operand of `~` becomes text as Python writes it, if it may be something else.
    fn shown(&mut self, operand: &Expr<'_>) {
        let is_text = match operand {
            Expr::BinOp(operation) => matches!(operation.op, BinOpKind::Concat),
            _ => operand.as_const().is_some_and(|value| value.as_str().is_some()),
        };
        if !is_text {
            self.filter(operand, SHOWN);
        }
    }

    /// Where an operand is `none`, a variable that may be missing is too.
    fn none_compared(&mut self, operands: &[&Expr<'_>]) {
        if operands.iter().any(|operand| is_none(operand)) {
            operands.iter().for_each(|operand| self.absent(operand));
        }
    }

    /// A variable that may be missing is `None` in this place.
    fn absent(&mut self, expression: &Expr<'_>) {
        if matches!(expression, Expr::Var(variable) if OPTIONAL.contains(&variable.id)) {
            self.filter(expression, ABSENT);
        }
    }
}

fn is_comparison(operation: &BinOpKind) -> bool {
    matches!(
        operation,
        BinOpKind::Eq | BinOpKind::Ne | BinOpKind::Lt | BinOpKind::Lte | BinOpKind::Gt | BinOpKind::Gte | BinOpKind::In
    )
}

/// Whether a text is Python's `Markup`: the result of a filter that makes it, or a sum with one.
fn is_safe(expression: &Expr<'_>) -> bool {
    match expression {
        Expr::Filter(filter) => SAFE.contains(&filter.name),
        Expr::BinOp(sum) if matches!(sum.op, BinOpKind::Add) => is_safe(&sum.left) || is_safe(&sum.right),
        _ => false,
    }
}

fn is_none(expression: &Expr<'_>) -> bool {
    expression.as_const().is_some_and(|value| value.is_none())
}

/// The template without plus signs that have no operand on their left, which minijinja's parser
/// does not know. Blanks take their place.
fn without_unary_plus(source: &str, syntax: &SyntaxConfig) -> Result<String, Error> {
    const WORDS: [&str; 8] = ["and", "elif", "else", "if", "in", "is", "not", "or"];
    let mut plain = source.to_owned();
    let mut follows_operand = false;
    for token in tokenize(source, false, syntax.clone()) {
        let (token, span) = token?;
        if matches!(token, Token::Plus) && !follows_operand {
            let at = span.start_offset as usize;
            plain.replace_range(at..=at, " ");
        }
        follows_operand = match token {
            Token::Ident(word) => !WORDS.contains(&word),
            Token::Str(_) | Token::String(_) | Token::Int(_) | Token::Int128(_) | Token::Float(_) => true,
            Token::ParenClose | Token::BracketClose | Token::BraceClose => true,
            _ => false,
        };
    }
    Ok(plain)
}

fn is_sum(operation: BinOpKind) -> bool {
    matches!(operation, BinOpKind::Add | BinOpKind::Concat)
}

/// Length of the chain of sums along the left: `a + b + c` has two.
fn sums(expression: &Expr<'_>) -> usize {
    match expression {
        Expr::BinOp(operation) if is_sum(operation.op) => 1 + sums(&operation.left),
        _ => 0,
    }
}

/// Whether a text ends with `{% raw %}`.
fn is_raw_tag(before: &str) -> bool {
    let tag = before.trim_end().strip_suffix("%}").and_then(|before| Some(&before[before.rfind("{%")? + 2..]));
    tag.is_some_and(|tag| tag.trim_matches(|char: char| char.is_whitespace() || "-+".contains(char)) == "raw")
}

fn end(expression: &Expr<'_>) -> usize {
    expression.span().end_offset as usize
}

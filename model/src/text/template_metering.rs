//! Rewriting of a template so that every value it creates is weighed (its bytes are counted) and
//! its operators behave as in Jinja2.
//!
//! minijinja limits steps, but one step may double a text, and forty such steps exhaust the memory
//! of any machine. minijinja's operators cannot be hooked, so the source is changed: for example,
//! `a + b` becomes `(a + b)|meter`. minijinja's parser reports the positions of all expressions.
//! Text is inserted on the same line, so that errors keep their line numbers.

use minijinja::machinery::ast::{BinOpKind, CallArg, Expr, Slice, Stmt, UnaryOpKind};
use minijinja::machinery::{Token, tokenize};
use minijinja::syntax::SyntaxConfig;
use minijinja::{Error, ErrorKind};

/// The filter that weighs a value.
pub(super) const METER: &str = "__bursar_meter";
/// The filter that weighs a value assigned to a namespace's attribute. A namespace must
/// not hold another namespace.
pub(super) const KEEP: &str = "__bursar_keep";
/// The filter for the operator `*`.
pub(super) const TIMES: &str = "__bursar_times";
/// The filter for the operator `%`, which also formats texts.
pub(super) const PERCENT: &str = "__bursar_percent";
pub(super) const SLICE: &str = "__bursar_slice";
/// The filter that converts an operand of `~` to text.
pub(super) const SHOWN: &str = "__bursar_shown";
/// The filter that converts an undefined value to `None`.
pub(super) const ABSENT: &str = "__bursar_absent";
/// The function that adds the bytes of literal template text to the count.
pub(super) const TEXT: &str = "__bursar_text";

/// Variables that a request may omit. Omitted variables are undefined, so that lengths and loops
/// work. In comparisons they also equal `none`, the value that transformers passes.
pub(super) const OPTIONAL: [&str; 2] = ["tools", "documents"];

/// Filters whose results Jinja2 does not escape again.
const SAFE: [&str; 4] = ["safe", "e", "escape", "forceescape"];

/// Maximum levels of nested statements and expressions. Released templates have about ten levels.
/// Without a limit, a long template could exhaust the stack.
const DEPTH_MAX: usize = 500;

/// In a chain of sums, every eighth sum and the last sum are weighed. Between two weighed sums, a
/// value may briefly exceed the limit by the size of a few operands.
const SUMS_UNWEIGHED: usize = 8;

/// Rewrites a template.
///
/// # Errors
/// The parser's errors, and an error for text that cannot be weighed: another template inside
/// this template (which transformers does not support either), or `{% raw %}` inside text
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

/// A text that replaces `bytes` bytes at the offset `at`.
struct Edit {
    at: usize,
    bytes: usize,
    text: String,
}

struct Metering<'a> {
    source: &'a str,
    /// Edits of inner expressions precede edits of outer expressions that end at the same offset.
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
    /// `[0]`, `|f`) begin after the operand. Its spans of comparisons and conditional expressions
    /// begin before the first operand, at the preceding token.
    fn start(&self, expression: &Expr<'_>) -> usize {
        let own = expression.span().start_offset as usize;
        let first = match expression {
            Expr::Compare(compare) => return self.start(&compare.expr),
            Expr::IfExpr(choice) => return self.start(&choice.true_expr),
            Expr::BinOp(operation) if is_comparison(&operation.op) => return self.start(&operation.left),
            Expr::UnaryOp(operation) if matches!(operation.op, UnaryOpKind::Not) => {
                // `a not in b` and `a is not b` have the operator between the operands.
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

    /// Puts an expression in parentheses, adds a filter, and puts both in parentheses, because
    /// `[0]` may follow. If the expression already begins with a parenthesis, the new parentheses
    /// may end up inside the existing ones, which does not change the meaning.
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
            // `LimitedText` limits the text that a template prints. Captured text becomes a
            // value instead and is weighed here.
            Stmt::EmitRaw(emit) if self.captures > 0 && !emit.raw.is_empty() => {
                let at = emit.raw.as_ptr() as usize - self.source.as_ptr() as usize;
                if is_raw_tag(&self.source[..at]) {
                    self.refused = Some("a raw block inside text that becomes a value");
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
            self.refused = Some("statements or expressions nested too deeply");
        }
        self.refused.is_some()
    }

    /// Visits the arguments of the filters in `{% filter a|b(c) %}`, where the innermost filter has
    /// no operand in the source.
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

    /// Visits an expression. `is_of_sum` is `true` if the expression is the left operand of a sum.
    fn operand(&mut self, expression: &Expr<'_>, is_of_sum: bool) {
        self.depth += 1;
        self.parts(expression);
        // Weighing each sum of a long chain would add a pair of parentheses per sum, and the parser
        // allows few nested levels.
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
                // minijinja divides by the number of arguments of `loop.cycle`, which
                // must not be 0.
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

    /// Adds a filter that weighs an expression's value, if the expression creates a value.
    fn whole(&mut self, expression: &Expr<'_>) {
        match expression {
            Expr::Slice(slice) => self.slice(slice, end(expression)),
            // Constants need no weighing, because the limit on the source bounds them.
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

    /// Replaces the first `sign` after the offset `after`. Only parentheses and blanks may be
    /// between the offset and the sign. Returns the offset after the sign.
    fn replace(&mut self, sign: &str, after: usize, text: String) -> usize {
        let at = after + self.source[after..].find(sign).expect("the sign follows in the source");
        self.edits.push(Edit { at, bytes: sign.len(), text });
        at + sign.len()
    }

    /// Rewrites `a[b:c:d]` as `((a)|slice(b, c, d))`.
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

    /// Adds a filter that converts an operand of `~` to text in Python's format, unless the operand
    /// is known to be text.
    fn shown(&mut self, operand: &Expr<'_>) {
        let is_text = match operand {
            Expr::BinOp(operation) => matches!(operation.op, BinOpKind::Concat),
            _ => operand.as_const().is_some_and(|value| value.as_str().is_some()),
        };
        if !is_text {
            self.filter(operand, SHOWN);
        }
    }

    /// In a comparison with `none`, makes missing optional variables equal to `none`.
    fn none_compared(&mut self, operands: &[&Expr<'_>]) {
        if operands.iter().any(|operand| is_none(operand)) {
            operands.iter().for_each(|operand| self.absent(operand));
        }
    }

    /// If the expression is an optional variable, converts a missing variable to
    /// `None` in this expression.
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

/// Whether the expression has Python's type `Markup`: the result of a filter that returns `Markup`,
/// or a sum with such a result.
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

/// Replaces each plus sign that has no operand on its left with a blank, because minijinja's parser
/// does not support the unary plus.
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

/// Number of sums in the chain of left operands: `a + b + c` has two.
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

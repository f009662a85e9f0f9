//! Templates that try to take all memory or the whole stack. Each ends in a typed error,
//! within bounded host memory.

mod heap;

use bursar_budgets::Hint;
use bursar_model::error::TextError;
use bursar_model::text::{ChatTemplate, Message, Role, TemplateInputs, TemplateLimits, TemplateSources};

/// Lower limits than the default, so that the test is short.
fn limits() -> TemplateLimits {
    TemplateLimits { values_bytes_max: 64 << 20, value_bytes_max: 1 << 20, ..TemplateLimits::default() }
}

fn render(source: &str) -> Result<String, TextError> {
    let sources = TemplateSources {
        templates: [("default".to_owned(), source.to_owned())].into(),
        special_tokens: Default::default(),
    };
    let template = ChatTemplate::new(sources, limits())?;
    let messages = [Message::text(Role::User, "Hello"), Message::text(Role::Assistant, "there")];
    template.render(&messages, &TemplateInputs::default())
}

fn repeated(piece: &str, times: usize) -> String {
    piece.repeat(times)
}

/// A template that runs `step`, which doubles a value, sixty times, and then reads the values.
fn doubling(step: &str) -> String {
    format!(
        "{{% set n = namespace(v='ab', l=['ab']) %}}{{% for i in range(60) %}}{step}{{% endfor %}}{{{{ n.v|length + n.l|length }}}}"
    )
}

fn attacks() -> Vec<(&'static str, String)> {
    let nested = |open: &str, close: &str, times: usize| {
        format!("{{{{ {}1{} }}}}", repeated(open, times), repeated(close, times))
    };
    vec![
        ("a text times a billion", "{{ 'a' * 10**9 }}".into()),
        ("a text times a hundred million, kept", "{% set a = 'a' * 100000000 %}{% set b = 'b' * 100000000 %}".into()),
        ("a billion times a text", "{{ 10**9 * 'a' }}".into()),
        ("a list times a hundred million", "{{ ([0] * 100000000)|length }}".into()),
        ("a tuple times a hundred million", "{{ ((0, 1) * 50000000)|length }}".into()),
        ("a product of products", "{{ ('a' * 1000 * 1000 * 1000)|length }}".into()),
        ("a product in parentheses", "{{ (('a' ~ 'b') * (1000 * 1000 * 1000))|length }}".into()),
        ("doubling by ~", doubling("{% set n.v = n.v ~ n.v %}")),
        ("doubling by +", doubling("{% set n.v = n.v + n.v %}")),
        ("doubling a list by +", doubling("{% set n.l = n.l + n.l %}")),
        ("a list of lists of lists", doubling("{% set n.l = [n.l, n.l] %}") + "{{ n.l }}"),
        ("a map of maps of maps", doubling("{% set n.l = {'a': n.l, 'b': n.l} %}") + "{{ n.l|tojson }}"),
        ("tuples of tuples", doubling("{% set n.l = (n.l, n.l) %}") + "{{ n.l }}"),
        ("doubling by format", doubling("{% set n.v = '%s%s'|format(n.v, n.v) %}")),
        ("doubling by str.format", doubling("{% set n.v = '{}{}'.format(n.v, n.v) %}")),
        ("doubling by join", doubling("{% set n.v = [n.v, n.v]|join('x') %}")),
        ("doubling by str.join", doubling("{% set n.v = n.v.join(['a', 'b', 'c']) %}")),
        ("doubling by replace", doubling("{% set n.v = n.v|replace('a', n.v) %}")),
        ("doubling by str.replace", doubling("{% set n.v = n.v.replace('b', n.v) %}")),
        ("doubling by a block", doubling("{% set v %}{{ n.v }}{{ n.v }}{% endset %}{% set n.v = v %}")),
        ("doubling by a macro", "{% macro m(v) %}{{ v }}{{ v }}{% endmacro %}".to_owned() + &doubling("{% set n.v = m(n.v) %}")),
        (
            "doubling by a caller",
            "{% macro m() %}{{ caller() }}{{ caller() }}{% endmacro %}".to_owned()
                + &doubling("{% set v %}{% call m() %}{{ n.v }}{% endcall %}{% endset %}{% set n.v = v %}"),
        ),
        ("doubling by a filter block", doubling("{% set v %}{% filter upper %}{{ n.v }}{{ n.v }}{% endfilter %}{% endset %}{% set n.v = v %}")),
        ("doubling by map", doubling("{% set n.v = [n.v]|map('replace', 'a', n.v)|first %}")),
        ("doubling by sum", doubling("{% set n.l = [n.l, n.l]|sum(start=[]) %}")),
        ("doubling by chain", doubling("{% set n.l = n.l|chain(n.l)|list %}")),
        ("a wide format", "{{ '%1000000000d'|format(1) }}".into()),
        ("a wide str.format", "{{ '{:>1000000000}'.format(1) }}".into()),
        ("a precise format", "{{ '%.1000000000f'|format(1.5) }}".into()),
        ("a width from the arguments", "{{ '%*d'|format(1000000000, 1) }}".into()),
        ("a width from the arguments of str.format", "{{ '{:{}}'.format(1, 1000000000) }}".into()),
        ("a wide zfill", "{{ 'x'.zfill(10**9) }}".into()),
        ("a wide ljust", "{{ 'x'.ljust(10**9, 'é') }}".into()),
        ("a wide center", "{{ 'x'.center(10**9) }}".into()),
        ("a wide center by the filter", "{{ 'x' | center(10**9) }}{{ 'x' | center(width=10**9) }}".into()),
        ("wide tabs", "{{ ('\t' * 1000).expandtabs(10**6) }}".into()),
        ("a wide %", "{{ '%1000000000d' % 1 }}".into()),
        ("a width of % from the arguments", "{{ '%*d' % (1000000000, 1) }}".into()),
        ("a precise %", "{{ '%.1000000000f' % 1.5 }}".into()),
        ("many wide places of %", "{{ ('%9999d' * 1000) % ((1,) * 1000) }}".into()),
        ("a width in a width", "{{ '{:{}{}}'.format(1, 99999, 99999) }}".into()),
        ("a percentage of a wide format", "{{ '{:999999999%}'.format(1) }}".into()),
        ("doubling by %", doubling("{% set n.v = '%s%s' % (n.v, n.v) %}")),
        ("doubling by a macro's escape", doubling("{% set n.v = (n.v + '<<')|e|string|forceescape|string + n.v %}")),
        ("doubling by urlencode", doubling("{% set n.v = (n.v + n.v)|urlencode %}")),
        ("doubling by wordwrap", doubling("{% set n.v = n.v|wordwrap(1, wrapstring=n.v) %}")),
        ("doubling by truncate", doubling("{% set n.v = (n.v * 2)|truncate(n.v|length + 1, true, n.v, 0) + n.v %}")),
        ("doubling by indent", doubling("{% set n.v = (n.v + '\n' + n.v)|indent(n.v, true) %}")),
        ("doubling by partition", doubling("{% set n.l = (n.v + 'x' + n.v).partition('x') %}{% set n.v = n.l|join %}")),
        ("a wordwrap of a huge text", "{{ ('a ' * 500000)|wordwrap(1, wrapstring='b' * 1000) }}".into()),
        ("a wordwrap of a huge word", "{{ ('a' * 1000000)|wordwrap(1) }}".into()),
        ("a wordwrap of blanks", "{{ (' ' * 1000000)|wordwrap(1) }}{{ (('\u{a0}' * 300000) ~ 'x')|wordwrap(100) }}{{ 'a' * 10**9 }}".into()),
        ("the lines of a huge text", "{{ ('\n' * 1000000).splitlines()|length }}".into()),
        ("the words of a huge text", "{{ ('a ' * 500000).rsplit()|length }}".into()),
        ("a truncate to a wide end", "{{ 'a'|truncate(10**12, end='b' * 10**9) }}".into()),
        ("a range of a trillion as text", "{{ range(10**12)|string }}".into()),
        ("many values of a cycler", "{% set c = cycler('a' * 900000, 'b') %}{% for i in range(100000) %}{% set x = c.next() ~ c.next() ~ i %}{% endfor %}".into()),
        ("a wide indent", "{{ 'a\nb'|indent(1000000000000) }}".into()),
        ("an indent of a wide text", "{{ ('a\n' * 100000)|indent(100000) }}".into()),
        ("a huge batch", "{{ [1]|batch(1000000000, 0)|list }}".into()),
        ("huge slices", "{{ [1]|slice(1000000000)|list }}".into()),
        ("a huge tojson", "{{ [1]|tojson(indent=1000000000000) }}{{ ('a' * 900000)|list|tojson }}".into()),
        ("many values at once", "{% set n = namespace(l=[]) %}{% for i in range(100000) %}{% set n.l = n.l + ['a' * 1000 ~ i] %}{% endfor %}".into()),
        (
            "many values one after the other",
            "{% for i in range(100000) %}{% set x = ('a' * 500000) ~ i %}{% endfor %}".into(),
        ),
        ("slices kept", "{% set a = 'a' * 1000000 %}{% for i in range(100000) %}{% set b = a[i:] %}{% endfor %}".into()),
        (
            "the template's own text in a block",
            "{% for i in range(100000) %}{% set x %}".to_owned() + &repeated("lorem ipsum ", 10_000) + "{% endset %}{% endfor %}",
        ),
        ("a namespace in itself", "{% set n = namespace() %}{% set n.n = n %}{{ n ~ '' }}".into()),
        ("a namespace in a list in itself", "{% set n = namespace() %}{% set n.n = [n] %}{{ n ~ '' }}".into()),
        ("namespaces in a new one", "{% set n = namespace() %}{% set m = namespace(n=n) %}{% set n.m = m %}{{ n ~ '' }}".into()),
        ("a macro that calls itself", "{% macro m(i) %}{{ m(i) }}{% endmacro %}{{ m(1) }}".into()),
        ("a loop that calls itself", "{% for i in [1] recursive %}{{ loop([1]) }}{% endfor %}".into()),
        ("endless loops", "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}".into()),
        ("a range of a billion", "{{ range(10**9)|list }}".into()),
        ("deep parentheses", nested("(", ")", 30_000)),
        ("deep lists", nested("[", "]", 30_000)),
        ("deep maps", nested("{'a':", "}", 20_000)),
        ("a long sum", format!("{{{{ 1{} }}}}", repeated("+1", 60_000))),
        ("a long product", format!("{{{{ 1{} }}}}", repeated("*1", 60_000))),
        ("a long chain of filters", format!("{{{{ 'a'{} }}}}", repeated("|e", 60_000))),
        ("a long chain of attributes", format!("{{{{ a{} }}}}", repeated(".a", 60_000))),
        ("a long chain of slices", format!("{{{{ 'a'{} }}}}", repeated("[:]", 40_000))),
        ("many nots", format!("{{{{ {}1 }}}}", repeated("not ", 40_000))),
        ("many signs", format!("{{{{ {}1 }}}}", repeated("-", 100_000))),
        ("a long choice", format!("{{{{ 1{} }}}}", repeated(" if 0 else 1", 15_000))),
        ("many branches", "{% if 0 %}".to_owned() + &repeated("{% elif 0 %}", 15_000) + "{% endif %}"),
        ("deep blocks", repeated("{% if 1 %}", 10_000) + &repeated("{% endif %}", 10_000)),
        ("a huge template", repeated("a", 1 << 20)),
        ("a broken template", "{% for %}".into()),
        ("a template that includes another template", "{% include 'default' %}".into()),
        ("an unknown filter with a deep name", "{{ 'a'|" .to_owned() + &repeated("b.", 20_000) + "c }}"),
    ]
}

#[test]
fn a_template_with_a_long_concatenation_renders() {
    let source = format!("{{{{ 'a'{} }}}}", repeated(" + 'b' ~ 'c'", 150));
    assert_eq!("a".to_owned() + &"bc".repeat(150), render(&source).unwrap_or_else(|error| panic!("{error}")));
}

/// All attacks are one test, because the heap counter covers the whole process and
/// tests run in parallel.
#[test]
fn each_hostile_template_fails_within_bounded_memory() {
    // The smallest stack that any thread of this project has.
    let story = std::thread::Builder::new().stack_size(2 << 20).spawn(|| {
        for (name, source) in attacks() {
            let begun = std::time::Instant::now();
            let (taken, outcome) = heap::peak_of(|| render(&source));
            println!("{name}: {:?} after {:?}, {} MB", outcome.as_ref().map(String::len), begun.elapsed(), taken >> 20);
            // The bound covers the limit on all values, the printed text, and the result of one
            // operation before its size is checked.
            assert!(taken < 160 << 20, "{name}: {taken} bytes");
            let error = outcome.expect_err(name);
            assert!(!error.hint().is_empty() && error.to_string().len() < 300, "{name}: {error}");
        }
    });
    story.expect("the thread starts").join().expect("the story does not panic");
}

#[test]
fn metered_templates_render_the_expected_text() {
    for (source, expected) in [
        (
            "{{ 2 * 3 }} {{ 2 * 1.5 }} {{ 'ab' * 3 }} {{ 2 * 'ab' }} {{ [1, 2] * 2 }} {{ 'a' * -1 }}|",
            "6 3.0 ababab abab [1, 2, 1, 2] |",
        ),
        ("{{ (1 + 2) * (3 + 4) }} {{ 1 + 2 * 3 }} {{ 2 * 3 + 1 }} {{ -2 * 3 }} {{ 2 * 3 * 4 }}", "21 7 7 -6 24"),
        ("{{ 'a' ~ (1 + 2) }} {{ ('a' + 'b')[1:] }} {{ 'abc'[1:][:1] }} {{ (('a') + ('b')) ~ (('c')) }}", "a3 b b abc"),
        ("{{ [messages[0].role, 1] }} {{ {'a': messages|length, 'b': [1]} }}", "['user', 1] {'a': 2, 'b': [1]}"),
        ("{% set n = namespace(a=1, b='x') %}{% set n.a = n.a + 1 %}{% set n.b = (n.b) %}{{ n.a }}{{ n.b }}", "2x"),
        ("{% set a, b = messages[0].role, 2 * 2 %}{{ a }}{{ b }}", "user4"),
        ("{{ 'x' if 1 + 1 == 2 and 'a' ~ 'b' in ['ab'] else 'y' ~ 'z' }} {{ not 'a' + 'b' }}", "x False"),
        ("{% set v %}\n  a{{ 1 + 1 }}\n{% endset %}{{ v }}", "  a2\n"),
        ("{% macro m(a, b='p' ~ 'q') %}\n{{ a }}: {{ b }}\n{% endmacro %}\n{{ m('x' * 2) }}", "xx: pq\n"),
        (
            "{%- for m in messages[::-1] if m.role ~ '' == 'user' %}{{ loop.index * 10 }}{{ m.content.split('l')|join('-') }}{% endfor %}",
            "10He--o",
        ),
        (
            "{{ messages|map(attribute='role')|join(', ') }} {{ '%s-%d'|format('a', 3) }} {{ '{}:{}'.format(1, 'b') }}",
            "user, assistant a-3 1:b",
        ),
        (
            "{{ dict(a=1, b=2)|items|list }} {{ 'a b'.split() }} {{ ' x '.strip() ~ '|' }}",
            "[('a', 1), ('b', 2)] ['a', 'b'] x|",
        ),
    ] {
        assert_eq!(expected, render(source).unwrap_or_else(|error| panic!("{source}: {error}")), "{source}");
    }
}

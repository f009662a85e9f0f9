//! Dependencies between the files of a crate (`arrows`), and their cycles.
//!
//! An arrow leads from the file that names an item to the file that defines it. Declarations
//! (`mod`) and re-exports (`pub use`) are not arrows: a path through them leads to the file of the
//! item. Unit tests are ignored.

use std::collections::{BTreeMap, BTreeSet};

/// One file of a crate as a module.
#[derive(Default)]
struct Module {
    file: String,
    code: String,
    children: BTreeSet<String>,
    /// Names that `use` brings into the module, with their paths.
    imports: BTreeMap<String, Vec<String>>,
    /// Paths of glob imports. The flag is `true` for `pub use`.
    globs: Vec<(bool, Vec<String>)>,
}

/// The modules of a crate, by their paths without `crate`.
pub struct Crate(BTreeMap<Vec<String>, Module>);

impl Crate {
    /// Reads the modules of a crate from `files`: their paths below the source folder, and their
    /// code without tests.
    pub fn of(files: impl IntoIterator<Item = (String, String)>) -> Crate {
        let mut modules = BTreeMap::new();
        for (file, code) in files {
            let path = file.trim_end_matches(".rs").split('/').map(str::to_owned);
            let mut path: Vec<String> = path.collect();
            if matches!(path.last().map(String::as_str), Some("mod" | "lib" | "main")) {
                path.pop();
            }
            let children = declared_modules(&code);
            let (mut imports, mut globs) = (BTreeMap::new(), Vec::new());
            for (is_public, name, path) in uses(&code) {
                if name == "*" {
                    globs.push((is_public, path));
                } else {
                    imports.insert(name, path);
                }
            }
            modules.insert(path, Module { file, code, children, imports, globs });
        }
        Crate(modules)
    }

    /// Each file, and the files whose items it names.
    pub fn arrows(&self) -> BTreeMap<&str, BTreeSet<&str>> {
        let mut arrows: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
        for (at, module) in &self.0 {
            let mut targets = BTreeSet::new();
            let without_uses = without_uses(&module.code);
            for path in paths(&without_uses) {
                targets.extend(self.definition(at, &path, 0));
            }
            for (name, path) in &module.imports {
                // The import of an item is an arrow even if only a trait's methods are used. The
                // import of a module is not an arrow, because other lines name the module's items.
                // A re-export is not an arrow either.
                if !is_reexported(&module.code, name) {
                    targets.extend(self.definition(at, path, 0).filter(|_| self.module(at, path, 0).is_none()));
                }
            }
            for (_, path) in module.globs.iter().filter(|(is_public, _)| !is_public) {
                targets.extend(
                    self.module(at, path, 0).and_then(|path| self.0.get(&path)).map(|module| module.file.as_str()),
                );
            }
            targets.remove(module.file.as_str());
            arrows.insert(&module.file, targets);
        }
        arrows
    }

    /// The strongly connected components: one list of files per group of files that reach each
    /// other.
    pub fn cycles(&self) -> Vec<Vec<&str>> {
        let arrows = self.arrows();
        let reached = |from| {
            let (mut seen, mut next) = (BTreeSet::new(), vec![from]);
            while let Some(at) = next.pop() {
                next.extend(arrows[at].iter().filter(|file| seen.insert(**file)));
            }
            seen
        };
        let reach: BTreeMap<&str, BTreeSet<&str>> = arrows.keys().map(|file| (*file, reached(file))).collect();
        let mut groups: Vec<Vec<&str>> = Vec::new();
        for (file, reached) in &reach {
            let known = groups.iter().any(|group| group.contains(file));
            if reached.contains(file) && !known {
                groups.push(reached.iter().filter(|other| reach[**other].contains(file)).copied().collect());
            }
        }
        groups
    }

    /// The module that a path names, as seen from the module `at`.
    fn module(&self, at: &[String], path: &[String], depth: usize) -> Option<Vec<String>> {
        let (mut here, rest) = self.start(at, path, depth)?;
        for name in rest {
            let module = self.0.get(&here)?;
            if module.children.contains(name) {
                here.push(name.clone());
            } else {
                here = self.module(&here.clone(), module.imports.get(name)?, depth + 1)?;
            }
        }
        self.0.contains_key(&here).then_some(here)
    }

    /// The file that defines the item that a path names, as seen from the module `at`.
    fn definition(&self, at: &[String], path: &[String], depth: usize) -> Option<&str> {
        let (mut here, rest) = self.start(at, path, depth)?;
        for name in rest {
            let module = self.0.get(&here)?;
            if module.children.contains(name) {
                here.push(name.clone());
                continue;
            }
            if let Some(import) = module.imports.get(name) {
                if let Some(module) = self.module(&here, import, depth + 1) {
                    here = module;
                    continue;
                }
                return self.definition(&here.clone(), import, depth + 1);
            }
            let from_glob = |(_, glob): &(bool, Vec<String>)| {
                let module = self.module(&here, glob, depth + 1)?;
                let defines = self.0.get(&module).is_some_and(|module| defines(&module.code, name));
                defines.then(|| self.0[&module].file.as_str())
            };
            return Some(module.globs.iter().find_map(from_glob).unwrap_or(&module.file));
        }
        None
    }

    /// The module at which a path starts, and the rest of the path. `None` for a path into another
    /// crate.
    fn start<'p>(&self, at: &[String], path: &'p [String], depth: usize) -> Option<(Vec<String>, &'p [String])> {
        if depth > 8 {
            return None;
        }
        let (first, mut rest) = path.split_first()?;
        let mut here = at.to_vec();
        match first.as_str() {
            "crate" => here.clear(),
            "self" => {}
            "super" => {
                here.pop()?;
                while rest.first().is_some_and(|name| name == "super") {
                    here.pop()?;
                    rest = &rest[1..];
                }
            }
            name => {
                let module = self.0.get(&here)?;
                let is_known = module.children.contains(name) || module.imports.contains_key(name);
                // In a `use`, if the first name of a path is also the imported name, the path
                // starts at another crate.
                let is_own =
                    module.imports.get(name).is_some_and(|import| import.first().is_some_and(|first| first == name));
                return (is_known && !is_own).then_some((here, path));
            }
        }
        Some((here, rest))
    }
}

/// The modules that a file declares, except modules that exist only in tests.
fn declared_modules(code: &str) -> BTreeSet<String> {
    let lines = code.lines().map(str::trim);
    let names = lines.filter_map(|line| {
        let line = line.strip_suffix(';')?;
        let (before, name) = line.rsplit_once("mod ")?;
        (before.is_empty() || before.starts_with("pub")).then_some(name)
    });
    names.map(str::to_owned).collect()
}

/// Every `use` of a file, with the braces expanded: whether it is public, the imported name and its
/// path.
fn uses(code: &str) -> Vec<(bool, String, Vec<String>)> {
    let mut found = Vec::new();
    for (is_public, tree) in use_declarations(code) {
        let mut names = Vec::new();
        expand(tree, &[], &mut names);
        found.extend(names.into_iter().map(|(name, path)| (is_public, name, path)));
    }
    found
}

/// Each `use` declaration: `true` if it is public, and the text between `use` and the semicolon.
fn use_declarations(code: &str) -> impl Iterator<Item = (bool, &str)> {
    code.match_indices("use ").filter_map(|(at, word)| {
        let line = code[..at].rfind('\n').map_or(0, |end| end + 1);
        let before = code[line..at].trim();
        let is_public = before.starts_with("pub");
        let tree = &code[at + word.len()..];
        (is_public || before.is_empty()).then(|| (is_public, &tree[..tree.find(';').unwrap_or(tree.len())]))
    })
}

fn without_uses(code: &str) -> String {
    let mut code = code.to_owned();
    let trees: Vec<String> = use_declarations(&code).map(|(_, tree)| format!("use {tree};")).collect();
    for tree in trees {
        code = code.replacen(&tree, "", 1);
    }
    code
}

fn expand(tree: &str, before: &[String], found: &mut Vec<(String, Vec<String>)>) {
    let tree = tree.trim();
    if let Some((head, group)) = tree.split_once('{') {
        let mut path = before.to_vec();
        path.extend(head.split("::").map(str::trim).filter(|name| !name.is_empty()).map(str::to_owned));
        for part in parts(group.trim_end().trim_end_matches('}')) {
            expand(part, &path, found);
        }
        return;
    }
    let (path, alias) = tree.split_once(" as ").map_or((tree, None), |(path, alias)| (path, Some(alias.trim())));
    let mut whole = before.to_vec();
    whole.extend(path.split("::").map(|name| name.trim().to_owned()).filter(|name| !name.is_empty()));
    if whole.last().is_some_and(|name| name == "self") && whole.len() > 1 {
        whole.pop();
    }
    let Some(name) = whole.last().cloned() else { return };
    if name == "*" {
        whole.pop();
    }
    found.push((alias.unwrap_or(&name).to_owned(), whole));
}

/// The elements of a group in braces, split at the commas outside nested braces.
fn parts(group: &str) -> Vec<&str> {
    let (mut depth, mut start, mut parts) = (0, 0, Vec::new());
    let mut end = group.len();
    for (at, letter) in group.char_indices() {
        match letter {
            '{' => depth += 1,
            '}' if depth == 0 => {
                end = at;
                break;
            }
            '}' => depth -= 1,
            ',' if depth == 0 => {
                parts.push(&group[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    parts.push(&group[start..end]);
    parts.retain(|part| !part.trim().is_empty());
    parts
}

/// Every path of two or more names in the code.
fn paths(code: &str) -> Vec<Vec<String>> {
    let is_name = |letter: char| letter.is_alphanumeric() || letter == '_' || letter == ':';
    let words = code.split(|letter: char| !is_name(letter)).filter(|word| word.contains("::"));
    let path = |word: &str| word.split("::").filter(|name| !name.is_empty()).map(str::to_owned).collect::<Vec<_>>();
    words.map(path).filter(|path| path.len() > 1).collect()
}

/// Returns whether a file re-exports a name and does not use it otherwise.
fn is_reexported(code: &str, name: &str) -> bool {
    use_declarations(code).any(|(is_public, tree)| is_public && has_word(tree, name))
        && !has_word(&without_uses(code), name)
}

fn has_word(code: &str, name: &str) -> bool {
    code.split(|letter: char| !letter.is_alphanumeric() && letter != '_').any(|word| word == name)
}

/// Returns whether the code defines an item of this name.
fn defines(code: &str, name: &str) -> bool {
    ["fn", "struct", "enum", "trait", "type", "const", "static", "union", "macro_rules!"].iter().any(|kind| {
        code.match_indices(&format!("{kind} {name}")).any(|(at, word)| {
            code[at + word.len()..].chars().next().is_none_or(|next| !next.is_alphanumeric() && next != '_')
        })
    })
}

#[test]
fn a_path_resolves_through_re_exports_to_the_defining_file() {
    let files = [
        ("lib.rs", "mod a;\nmod b;\npub use a::A;\n"),
        ("a.rs", "pub struct A;\nuse crate::b::{self, c::C};\nfn f(_: C) { b::d() }\n"),
        ("b/mod.rs", "mod c;\npub use c::d;\n"),
        ("b/c.rs", "use super::super::A;\npub struct C;\npub fn d() {}\n"),
    ];
    let known = Crate::of(files.map(|(file, code)| (file.to_owned(), code.to_owned())));
    let arrows = known.arrows();
    assert_eq!(arrows["a.rs"], BTreeSet::from(["b/c.rs"]));
    assert_eq!(arrows["b/c.rs"], BTreeSet::from(["a.rs"]));
    assert_eq!(arrows["lib.rs"], BTreeSet::new());
    assert_eq!(known.cycles(), [["a.rs", "b/c.rs"]]);
}

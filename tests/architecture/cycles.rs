//! Rule about files: the files of a crate form no cycle. An arrow goes from a file to the file that
//! defines a name that it uses. A `mod` declaration and a re-export of a child are no arrows.

use std::collections::{BTreeMap, BTreeSet};

use crate::{code, sources};

/// Crates without cycles of files. The other crates have only their top-level modules checked.
const CHECKED: [&str; 3] = ["src", "serve/src", "cli/src"];

/// Path of a module or an item from the root of its crate.
type Path = Vec<String>;

/// A name that a file imports.
struct Import {
    path: Path,
    name: String,
    is_public: bool,
}

#[derive(Default)]
struct Crate {
    /// File of each module.
    files: BTreeMap<Path, String>,
    code: BTreeMap<Path, String>,
    imports: BTreeMap<Path, Vec<Import>>,
}

fn words(path: &str) -> Path {
    path.split("::").map(str::trim).filter(|word| !word.is_empty()).map(str::to_owned).collect()
}

/// The module in a file below the folder of its crate.
fn module_of(file: &str) -> Path {
    let mut module: Path = file.trim_end_matches(".rs").split('/').map(str::to_owned).collect();
    if module.last().is_some_and(|name| name == "mod")
        || matches!(&module[..], [name] if name == "lib" || name == "main")
    {
        module.pop();
    }
    module
}

/// Splits code into its `use` statements, with whether they are public, and the rest.
fn statements(code: &str) -> (Vec<(bool, String)>, String) {
    let (mut uses, mut rest, mut open) = (Vec::new(), String::new(), None::<(bool, String)>);
    for line in code.lines() {
        let (is_public, plain) = match line.trim_start().strip_prefix("pub") {
            Some(public) => (true, public.trim_start_matches(|letter| letter != ' ').trim_start()),
            None => (false, line.trim_start()),
        };
        if open.is_none() {
            open = plain.strip_prefix("use ").map(|_| (is_public, String::new()));
        }
        let Some((_, tree)) = &mut open else {
            rest.push_str(line);
            rest.push('\n');
            continue;
        };
        tree.push_str(if tree.is_empty() { plain.trim_start_matches("use ") } else { line.trim() });
        if tree.ends_with(';') {
            uses.extend(open.take());
        }
    }
    (uses, rest)
}

/// The paths of a `use` tree, each with the name that it gets.
fn leaves(tree: &str, before: &[String]) -> Vec<(Path, String)> {
    let tree = tree.trim();
    if let Some((start, group)) = tree.strip_suffix('}').and_then(|tree| tree.split_once('{')) {
        let before = [before, &words(start)].concat();
        let (mut depth, mut leaf, mut found) = (0, String::new(), Vec::new());
        for letter in group.chars().chain([',']) {
            match letter {
                ',' if depth == 0 => found.extend(leaves(&std::mem::take(&mut leaf), &before)),
                letter => {
                    depth += i32::from(letter == '{') - i32::from(letter == '}');
                    leaf.push(letter);
                }
            }
        }
        return found;
    }
    let (path, name) = tree.split_once(" as ").unwrap_or((tree, ""));
    let mut path = [before, &words(path)].concat();
    path.pop_if(|last| last == "self");
    let own = path.last().cloned().unwrap_or_default();
    if own.is_empty() { Vec::new() } else { vec![(path, if name.is_empty() { own } else { name.to_owned() })] }
}

/// Paths of two words or more in code.
fn paths(code: &str) -> Vec<Path> {
    let is_of_path = |letter: char| letter.is_alphanumeric() || matches!(letter, '_' | ':');
    let paths = code.split(|letter| !is_of_path(letter)).filter(|path| path.contains("::"));
    paths.map(|path| words(path.trim_start_matches(':'))).filter(|path| path.len() > 1).collect()
}

impl Crate {
    fn of(files: impl IntoIterator<Item = (String, String)>) -> Self {
        let mut all = Crate::default();
        for (file, text) in files.into_iter().filter(|(file, _)| !file.contains("tests")) {
            let module = module_of(&file);
            all.code.insert(module.clone(), code(&text));
            all.files.insert(module, file);
        }
        for module in all.files.keys().cloned().collect::<Vec<_>>() {
            let (uses, rest) = statements(&all.code[&module]);
            let mut imports = Vec::new();
            for (is_public, tree) in uses {
                let found = leaves(tree.trim_end_matches(';'), &[]).into_iter();
                let found = found.filter_map(|(path, name)| Some((all.absolute(&module, &path)?, name)));
                imports.extend(found.map(|(path, name)| Import { path, name, is_public }));
            }
            all.imports.insert(module.clone(), imports);
            all.code.insert(module, rest);
        }
        all
    }

    /// A path as written in a module, from the root of the crate. `None` for a path of another crate.
    fn absolute(&self, module: &[String], path: &[String]) -> Option<Path> {
        let above = path.iter().take_while(|word| *word == "super").count();
        match path[0].as_str() {
            "crate" => Some(path[1..].to_vec()),
            "self" => Some([module, &path[1..]].concat()),
            "super" => Some([&module[..module.len().checked_sub(above)?], &path[above..]].concat()),
            first => {
                let child = [module, &[first.to_owned()]].concat();
                self.files.contains_key(&child).then(|| [module, path].concat())
            }
        }
    }

    /// The module that defines the item of a path, and the part of the path within that module.
    /// Follows re-exports.
    fn definition(&self, path: &[String]) -> (Path, Path) {
        let is_module = |end: &usize| self.files.contains_key(&path[..*end]);
        let end = (0..=path.len()).take_while(|end| is_module(end)).last().unwrap_or(0);
        let (module, item) = path.split_at(end);
        let exported = item
            .first()
            .and_then(|name| self.imports.get(module)?.iter().find(|import| import.is_public && import.name == *name));
        match exported {
            Some(import) if import.path != path => self.definition(&[&import.path[..], &item[1..]].concat()),
            _ => (module.to_vec(), item.to_vec()),
        }
    }

    /// The modules that define what this module uses.
    fn used_by(&self, module: &[String]) -> BTreeSet<Path> {
        let (mut used, mut names) = (BTreeSet::new(), BTreeMap::new());
        for import in &self.imports[module] {
            let (from, item) = self.definition(&import.path);
            let has_children = self.files.keys().any(|other| other.starts_with(&from) && *other != from);
            if item.is_empty() {
                names.insert(&import.name, &import.path);
            }
            let is_re_export = import.is_public && from.starts_with(module);
            if !(is_re_export || item.is_empty() && has_children) {
                used.insert(from);
            }
        }
        for path in paths(&self.code[module]) {
            let path = match names.get(&path[0]) {
                Some(import) => Some([&import[..], &path[1..]].concat()),
                None => self.absolute(module, &path),
            };
            used.extend(path.map(|path| self.definition(&path).0));
        }
        used.remove(module);
        used
    }

    /// The files that use themselves through other files.
    fn files_in_cycles(&self) -> Vec<&str> {
        let arrows: BTreeMap<&Path, BTreeSet<Path>> =
            self.files.keys().map(|module| (module, self.used_by(module))).collect();
        let reaches_itself = |module: &Path| {
            let (mut seen, mut next) = (BTreeSet::new(), vec![module]);
            while let Some(at) = next.pop() {
                next.extend(arrows[at].iter().filter(|used| seen.insert(*used)));
            }
            seen.contains(module)
        };
        self.files.iter().filter(|(module, _)| reaches_itself(module)).map(|(_, file)| file.as_str()).collect()
    }
}

#[test]
fn files_of_a_checked_crate_have_no_cycle() {
    for folder in CHECKED {
        let below = |(file, text): (String, String)| (file[folder.len() + 1..].to_owned(), text);
        let all = Crate::of(sources(folder).into_iter().map(below));
        assert_eq!(all.files_in_cycles(), [""; 0], "in {folder}");
    }
}

#[test]
fn a_cycle_of_files_is_found_through_imports_paths_and_parents() {
    let cycles = |files: &[(&str, &str)]| {
        let files = [("lib.rs", "")].iter().chain(files);
        let all = Crate::of(files.map(|(file, text)| ((*file).to_owned(), (*text).to_owned())));
        all.files_in_cycles().into_iter().map(str::to_owned).collect::<Vec<_>>()
    };
    let none = [""; 0];
    assert_eq!(
        cycles(&[("a.rs", "use crate::{b::{self, B}, c};"), ("b.rs", "fn b() { super::a::a() }")]),
        ["a.rs", "b.rs"]
    );
    assert_eq!(cycles(&[("a.rs", "use super::b;"), ("b.rs", "use super::c;"), ("c.rs", "struct C;")]), none);
    // A child that uses an item of its parent, and one that uses a re-export of its sibling.
    let parent = "mod b;\nmod c;\npub use self::c::C;\nuse self::b::B;";
    assert_eq!(cycles(&[("a.rs", parent), ("a/b.rs", "use super::A;"), ("a/c.rs", "")]), ["a.rs", "a/b.rs"]);
    assert_eq!(cycles(&[("a.rs", parent), ("a/b.rs", "use super::C;"), ("a/c.rs", "")]), none);
}

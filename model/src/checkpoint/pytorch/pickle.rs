//! The pickled dictionary of tensors that `torch.save` writes. The pickle is only parsed, and no
//! call in it is executed. A value is a node that is stored once and referred to by its index, so
//! no file creates more nodes than it has bytes.
//!
//! The format: CPython, `Lib/pickletools.py`, protocols 2 to 4; `torch/_utils.py` for the
//! meaning of the calls.

use std::collections::HashMap;

/// The index of a value.
pub(super) type Node = usize;

#[derive(Clone, Debug, PartialEq)]
pub(super) enum Value<'f> {
    None,
    Bool,
    Float,
    Int(i64),
    Text(&'f str),
    /// A class or a function, by module and name.
    Global(&'f str, &'f str),
    Tuple(Vec<Node>),
    List,
    Dict(Vec<(Node, Node)>),
    /// A call: a global and a tuple of arguments. The call is never executed.
    Call(Node, Node),
    /// A storage, by the tuple that names it.
    Storage(Node),
    Mark,
}

/// All values of a pickle, and the index of the outermost value.
#[derive(Debug)]
pub(super) struct Pickle<'f> {
    values: Vec<Value<'f>>,
    pub root: Node,
}

impl<'f> Pickle<'f> {
    /// # Errors
    /// A description of what is wrong with the pickle.
    pub fn read(bytes: &'f [u8]) -> Result<Self, String> {
        let mut reader = Reader { bytes, at: 0, values: Vec::new(), stack: Vec::new(), memo: HashMap::new() };
        loop {
            let at = reader.at;
            let failed = |reason| format!("{reason} at byte {at} of its pickle");
            if let Some(root) = reader.step().map_err(failed)? {
                return Ok(Pickle { values: reader.values, root });
            }
        }
    }

    pub fn value(&self, node: Node) -> &Value<'f> {
        &self.values[node]
    }

    /// The entries of a tuple.
    pub fn tuple(&self, node: Node) -> Option<&[Node]> {
        if let Value::Tuple(entries) = self.value(node) { Some(entries) } else { None }
    }

    pub fn text(&self, node: Node) -> Option<&'f str> {
        if let Value::Text(text) = self.value(node) { Some(text) } else { None }
    }

    /// The value of a non-negative integer.
    pub fn number(&self, node: Node) -> Option<usize> {
        if let Value::Int(number) = self.value(node) { usize::try_from(*number).ok() } else { None }
    }

    /// The values of a tuple of up to `most` non-negative integers.
    pub fn numbers(&self, node: Node, most: usize) -> Option<Vec<usize>> {
        self.tuple(node).filter(|entries| entries.len() <= most)?.iter().map(|entry| self.number(*entry)).collect()
    }
}

struct Reader<'f> {
    bytes: &'f [u8],
    at: usize,
    values: Vec<Value<'f>>,
    stack: Vec<Node>,
    memo: HashMap<u32, Node>,
}

impl<'f> Reader<'f> {
    /// Reads one instruction. Returns the outermost value when the pickle ends.
    fn step(&mut self) -> Result<Option<Node>, &'static str> {
        match self.number(1)? as u8 {
            0x80 => drop(self.take(1)?),
            0x95 => drop(self.take(8)?),
            b'.' => return self.pop().map(Some),
            b'N' => self.push(Value::None),
            0x88 | 0x89 => self.push(Value::Bool),
            b'G' => {
                self.take(8)?;
                self.push(Value::Float);
            }
            b'K' => self.int(1)?,
            b'M' => self.int(2)?,
            b'J' => {
                let number = self.number(4)? as u32;
                self.push(Value::Int(number.cast_signed().into()));
            }
            0x8a => self.long()?,
            b'X' => self.text(4)?,
            0x8c => self.text(1)?,
            b'c' => {
                let (module, name) = (self.line()?, self.line()?);
                self.push(Value::Global(module, name));
            }
            0x93 => self.global()?,
            b'(' => self.push(Value::Mark),
            b')' => self.push(Value::Tuple(Vec::new())),
            b']' => self.push(Value::List),
            b'}' => self.push(Value::Dict(Vec::new())),
            0x85 => self.tuple(1)?,
            0x86 => self.tuple(2)?,
            0x87 => self.tuple(3)?,
            b't' => {
                let entries = self.marked()?;
                self.push(Value::Tuple(entries));
            }
            b'a' => drop(self.pop()?),
            b'e' => drop(self.marked()?),
            b's' => {
                let (value, key) = (self.pop()?, self.pop()?);
                self.insert(vec![key, value])?;
            }
            b'u' => {
                let entries = self.marked()?;
                self.insert(entries)?;
            }
            b'R' | 0x81 => self.call()?,
            // The instruction sets the state of a value. The state is ignored, because torch stores
            // only the versions of modules there.
            b'b' => drop(self.pop()?),
            b'Q' => {
                let name = self.pop()?;
                self.push(Value::Storage(name));
            }
            b'q' => self.remember(1)?,
            b'r' => self.remember(4)?,
            0x94 => self.put(self.memo.len() as u32)?,
            b'h' => self.recall(1)?,
            b'j' => self.recall(4)?,
            _ => return Err("it has an instruction that torch does not write"),
        }
        Ok(None)
    }

    fn take(&mut self, bytes: usize) -> Result<&'f [u8], &'static str> {
        let taken = self.at.checked_add(bytes).and_then(|end| self.bytes.get(self.at..end)).ok_or("it is cut off")?;
        self.at += bytes;
        Ok(taken)
    }

    fn number(&mut self, bytes: usize) -> Result<u64, &'static str> {
        Ok(self.take(bytes)?.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte)))
    }

    fn int(&mut self, bytes: usize) -> Result<(), &'static str> {
        let number = self.number(bytes)? as i64;
        self.push(Value::Int(number));
        Ok(())
    }

    /// A number of up to eight bytes, in two's complement.
    fn long(&mut self) -> Result<(), &'static str> {
        let bytes = self.number(1)? as usize;
        if !(1..=8).contains(&bytes) {
            return Err("it has an integer of no bytes or of more than 8");
        }
        let unused = 64 - 8 * bytes;
        let number = self.number(bytes)?.cast_signed() << unused >> unused;
        self.push(Value::Int(number));
        Ok(())
    }

    fn text(&mut self, length: usize) -> Result<(), &'static str> {
        let bytes = self.number(length)? as usize;
        let text = std::str::from_utf8(self.take(bytes)?).map_err(|_| "it has a string that is not UTF-8")?;
        self.push(Value::Text(text));
        Ok(())
    }

    fn line(&mut self) -> Result<&'f str, &'static str> {
        let length = self.bytes[self.at..].iter().position(|byte| *byte == b'\n').ok_or("it is cut off")?;
        let line = std::str::from_utf8(&self.take(length + 1)?[..length]);
        line.map_err(|_| "it has a name that is not UTF-8")
    }

    /// A global whose module and name were pushed before.
    fn global(&mut self) -> Result<(), &'static str> {
        let (name, module) = (self.pop()?, self.pop()?);
        let (Value::Text(module), Value::Text(name)) = (&self.values[module], &self.values[name]) else {
            return Err("it has a name that is not a string");
        };
        self.push(Value::Global(module, name));
        Ok(())
    }

    fn push(&mut self, value: Value<'f>) {
        self.stack.push(self.values.len());
        self.values.push(value);
    }

    fn pop(&mut self) -> Result<Node, &'static str> {
        self.stack.pop().ok_or("its stack is empty")
    }

    /// Removes and returns all nodes since the last mark.
    fn marked(&mut self) -> Result<Vec<Node>, &'static str> {
        let mark = self.stack.iter().rposition(|node| self.values[*node] == Value::Mark).ok_or("it has no mark")?;
        let marked = self.stack.split_off(mark + 1);
        self.stack.pop();
        Ok(marked)
    }

    fn tuple(&mut self, entries: usize) -> Result<(), &'static str> {
        let first = self.stack.len().checked_sub(entries).ok_or("its stack is empty")?;
        let entries = self.stack.split_off(first);
        self.push(Value::Tuple(entries));
        Ok(())
    }

    fn insert(&mut self, entries: Vec<Node>) -> Result<(), &'static str> {
        let dict = *self.stack.last().ok_or("its stack is empty")?;
        let Value::Dict(pairs) = &mut self.values[dict] else { return Err("it has an entry outside a dictionary") };
        let (new, odd) = entries.as_chunks();
        pairs.extend(new.iter().map(|[key, value]| (*key, *value)));
        odd.is_empty().then_some(()).ok_or("it has a key without a value")
    }

    fn call(&mut self) -> Result<(), &'static str> {
        let (arguments, callable) = (self.pop()?, self.pop()?);
        let is_dict = self.values[callable] == Value::Global("collections", "OrderedDict");
        self.push(if is_dict { Value::Dict(Vec::new()) } else { Value::Call(callable, arguments) });
        Ok(())
    }

    fn remember(&mut self, bytes: usize) -> Result<(), &'static str> {
        let name = self.number(bytes)? as u32;
        self.put(name)
    }

    fn put(&mut self, name: u32) -> Result<(), &'static str> {
        let node = *self.stack.last().ok_or("its stack is empty")?;
        self.memo.insert(name, node);
        Ok(())
    }

    fn recall(&mut self, bytes: usize) -> Result<(), &'static str> {
        let name = self.number(bytes)? as u32;
        let node = *self.memo.get(&name).ok_or("it refers to a missing value")?;
        self.stack.push(node);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pickled_tuple_beyond_the_limit_is_not_copied() {
        let nine = [&b"\x80\x02("[..], &b"K\x01".repeat(9), b"t."].concat();
        let pickle = Pickle::read(&nine).expect("a tuple");
        assert_eq!(pickle.numbers(pickle.root, 8), None);
        assert_eq!(pickle.numbers(pickle.root, 9), Some(vec![1; 9]));
    }
}

//! Generation options: each option takes effect and changes nothing else.

use std::{collections::BTreeMap, time::Duration};

use bursar::{
    Chat, ChatError, ChatEvent, Content, Deadline, Envelope, FinishReason, Hint, LoadOptions, OutputFormat, Role,
    StopReason,
};
use serde_json::{Value, json};

use crate::metrics_log::MetricsLog;
use crate::stage::{Stage, Whole, about, answer, ask, eventually, listen, picture, small, small_envelope, story, text};

/// A question whose reply depends on the seed.
fn chance(seed: u64) -> Chat {
    text("Tell me something.").temperature(9.0).top_k(0).top_p(1.0).seed(seed).max_tokens(40)
}

#[test]
fn equal_seeds_give_equal_replies_under_load_and_other_seeds_differ() {
    story(async {
        let stage = Stage::set(small()).await;
        let mut replies = BTreeMap::new();
        for seed in 0..6 {
            replies.insert(seed, answer(&stage.model, chance(seed)).await);
        }
        let distinct: std::collections::BTreeSet<_> = replies.values().collect();
        assert!(distinct.len() >= 5, "{} of 6 replies differ", distinct.len());
        let together: Vec<_> = (0..6)
            .map(|seed| {
                let model = stage.model.clone();
                tokio::spawn(async move { (seed, answer(&model, chance(seed)).await) })
            })
            .collect();
        for reply in together {
            let (seed, text) = reply.await.expect("no panic");
            assert_eq!(text, replies[&seed], "seed {seed} with concurrent requests");
        }
    });
}

#[test]
fn a_step_is_prepared_ahead_unless_the_host_needs_its_token() {
    let metrics_log = MetricsLog::open();
    story(async {
        let drawn = about(1).temperature(1.0).repetition_penalty(1.1).log_probabilities(2).seed(3);
        let formed = about(1).format(OutputFormat::Regex("[a-z ]{4,}".to_owned())).max_tokens(20);
        for (name, chat, steps) in [("greedy", about(1), 2.0), ("drawn", drawn, 2.0), ("formed", formed, 1.0)] {
            // The whole prompt fits in one step, so each later step of the reply samples a token.
            let mut options = LoadOptions { name: Some(name.to_owned()), ..small() };
            options.envelope.as_mut().expect("small limits").step_tokens = 200;
            let stage = Stage::set(options).await;
            let reply = answer(&stage.model, chat).await;
            assert!(!reply.is_empty());
            assert_eq!(metrics_log.most(&format!("bursar_steps_under_way{{model={name}}}")), Some(steps), "{name}");
        }
    });
}

#[test]
fn a_penalised_reply_is_equal_batched_cached_or_after_deaths() {
    story(async {
        let envelope = small_envelope();
        let stage = Stage::set(LoadOptions { envelope: Some(envelope), ..small() }).await;
        let before = stage.snapshot().await;
        let tired = |number: u32| {
            let chat = about(number).temperature(1.5).seed(u64::from(number)).max_tokens(60).ignore_end();
            let chat = chat.repetition_penalty(1.3).presence_penalty(0.5).frequency_penalty(0.5);
            if number.is_multiple_of(2) { chat.log_probabilities(3) } else { chat.logit_bias(number, 5.0) }
        };
        let ids = |whole: &Whole| whole.tokens.iter().map(|score| score.token.id).collect::<Vec<_>>();
        let mut alone = Vec::new();
        for number in 0..6 {
            let whole = ask(&stage.model, tired(number)).await.expect("the model answers");
            alone.push((whole.text.clone(), ids(&whole)));
        }
        assert_ne!(alone[1].0, answer(&stage.model, tired(1).repetition_penalty(1.0)).await, "the penalty matters");
        for dies in [false, true] {
            let mut replies = Vec::new();
            for number in 0..6 {
                replies.push(stage.model.chat(tired(number)).await.expect("accepted"));
            }
            if dies {
                let first = replies[0].next().await.expect("an event").expect("a token");
                assert!(matches!(first, ChatEvent::Token(_)), "the chat asks for tokens");
                stage.model.serving().await.expect("the model serves").scheduler.kill();
            }
            for (number, reply) in replies.into_iter().enumerate() {
                let whole = listen(reply).await.expect("the model answers");
                let events_read = usize::from(dies && number == 0);
                assert_eq!(
                    (&whole.text, &ids(&whole)[..]),
                    (&alone[number].0, &alone[number].1[events_read..]),
                    "{number}, {dies}"
                );
            }
        }
        stage.settled(&before).await;
    });
}

#[test]
fn samples_match_their_seeds_replies_and_share_one_prompt_computation() {
    story(async {
        let stage = Stage::set(small()).await;
        let before = stage.snapshot().await;
        let long = |seed| {
            let chat = Chat::new().user("shapes ".repeat(40)).image(picture(1));
            chat.temperature(9.0).top_k(0).top_p(1.0).seed(seed).max_tokens(20)
        };
        let samples = stage.model.samples(long(70), 5).await.expect("accepted");
        assert_eq!(stage.model.requests().0, 5, "each sample counts as a request");
        let mut wholes = Vec::new();
        for sample in samples {
            wholes.push(listen(sample).await.expect("the model answers"));
        }
        assert_eq!(wholes[0].cached_tokens, 0, "no earlier request has this prefix");
        for whole in &wholes[1..] {
            let prompt = whole.usage.prompt_tokens;
            assert_eq!(whole.cached_tokens, (prompt - 1) / 16 * 16, "a sample finds all whole blocks of the prompt");
        }
        for (sample, whole) in wholes.iter().enumerate() {
            let alone = ask(&stage.model, long(70 + sample as u64)).await.expect("the model answers");
            assert_eq!((&alone.text, alone.usage), (&whole.text, whole.usage), "sample {sample}");
        }
        stage.settled(&before).await;
    });
}

#[test]
fn a_dropped_sample_does_not_end_other_samples() {
    story(async {
        let stage = Stage::set(small()).await;
        let before = stage.snapshot().await;
        let expected: Vec<_> = {
            let samples = stage.model.samples(chance(5), 3).await.expect("accepted");
            let mut texts = Vec::new();
            for sample in samples {
                texts.push(listen(sample).await.expect("the model answers").text);
            }
            texts
        };
        for dropped in 0..3 {
            for events_read in 0..3 {
                let mut samples = stage.model.samples(chance(5), 3).await.expect("accepted");
                let mut gone = samples.remove(dropped);
                for _ in 0..events_read {
                    drop(gone.next().await);
                }
                drop(gone);
                let rest = (0..3).filter(|sample| *sample != dropped);
                for (sample, reply) in rest.zip(samples) {
                    let text = listen(reply).await.expect("the model answers").text;
                    assert_eq!(text, expected[sample], "{sample} without {dropped} after {events_read} events");
                }
            }
        }
        stage.settled(&before).await;
    });
}

#[test]
fn samples_are_all_accepted_or_none() {
    story(async {
        let stage = Stage::set(LoadOptions { requests: Some(4), ..small() }).await;
        for (samples, limit) in [(0, 4), (5, 4)] {
            let error = stage.model.samples(chance(1), samples).await.expect_err("an impossible number of samples");
            assert!(matches!(error, ChatError::Samples { samples: s, limit: l } if (s, l) == (samples, limit)));
            assert!(error.hint().contains("samples"));
        }
        let one = stage.model.chat(chance(1)).await.expect("accepted");
        let error = stage.model.samples(chance(1), 4).await.expect_err("five requests exceed the limit of four");
        assert!(matches!(error, ChatError::Overloaded { limit: 4 }));
        assert_eq!(stage.model.requests().0, 1, "refused samples hold no request slots");
        listen(one).await.expect("the model answers");
        assert_eq!(stage.model.samples(chance(1), 4).await.expect("all four samples are accepted").len(), 4);
    });
}

#[test]
fn a_turn_reuses_the_cached_prefix_of_the_previous_turn() {
    story(async {
        let stage = Stage::set(small()).await;
        let first = about(1);
        let reply = ask(&stage.model, first.clone()).await.expect("the model answers");
        assert_eq!(reply.cached_tokens, 0);
        let second = first.assistant(&reply.text).user("And how many are there?");
        let whole = ask(&stage.model, second.clone()).await.expect("the model answers");
        assert!(whole.cached_tokens >= 16, "{} cached tokens of {:?}", whole.cached_tokens, whole.usage);
        // A model with empty caches gives the same answer.
        let fresh = Stage::set(small()).await;
        let again = ask(&fresh.model, second).await.expect("the model answers");
        assert_eq!((again.cached_tokens, again.text, again.usage), (0, whole.text, whole.usage));
    });
}

#[test]
fn a_salted_prefix_is_reused_only_with_the_same_salt() {
    story(async {
        let stage = Stage::set(small()).await;
        let long = || Chat::new().user("shapes ".repeat(60)).temperature(0.0).max_tokens(4);
        let mut cached = Vec::new();
        for salt in [Some("mine"), None, Some("yours"), Some("mine"), None] {
            let chat = salt.into_iter().fold(long(), Chat::cache_salt);
            cached.push(ask(&stage.model, chat).await.expect("the model answers").cached_tokens > 0);
        }
        assert_eq!(cached, [false, false, false, true, true]);
    });
}

#[test]
fn running_replies_release_the_rows_of_their_pictures() {
    story(async {
        let envelope = Some(Envelope { sequences: 13, ..small_envelope() });
        let stage = Stage::set(LoadOptions { envelope, kv_tokens: Some(4096), ..small() }).await;
        let before = stage.snapshot().await;
        let rows = stage.model.serving().await.expect("the model serves").record.cache_rows;
        let (mut running, mut shown) = (Vec::new(), 0);
        for number in 0..12 {
            // No task reads this reply, so its stream fills up and the sequence does not end.
            let endless = about(number)
                .temperature(20.0)
                .top_k(0)
                .top_p(1.0)
                .seed(u64::from(number))
                .max_tokens(180)
                .ignore_end();
            let mut reply = stage.model.chat(endless.image(picture(number + 40))).await.expect("accepted");
            // The first event is sent after the prompt is computed.
            reply.next().await.expect("the reply begins").expect("the model answers");
            let prompt = stage.model.prompt_of(about(number).image(picture(number + 40))).await.expect("a prompt");
            shown += prompt.picture_tokens.iter().sum::<usize>();
            running.push(reply);
        }
        assert!(shown > rows, "{shown} rows were used, of {rows} in the cache");
        assert_eq!(stage.model.requests().0, 12, "all twelve requests run");
        answer(&stage.model, about(90)).await;
        for reply in running {
            listen(reply).await.expect("the model answers");
        }
        stage.settled(&before).await;
    });
}

#[test]
fn an_earlier_turns_picture_is_neither_decoded_nor_encoded_again() {
    let metrics_log = MetricsLog::open();
    story(async {
        let name = Some("turns".to_owned());
        let stage = Stage::set(LoadOptions { name, ..small() }).await;
        let before = stage.snapshot().await;
        let counts = || {
            let names = ["pictures_found_computed", "encoder_cache_queries", "encoder_cache_hits"];
            names.map(|name| metrics_log.now(&format!("bursar_{name}_total{{model=turns}}")))
        };
        let first = about(1).image(picture(2));
        let reply = answer(&stage.model, first.clone()).await;
        assert_eq!(counts(), [0.0, 2.0, 0.0]);
        let second = first.clone().assistant(&reply).user("And how many are there?");
        let whole = ask(&stage.model, second.clone()).await.expect("the model answers");
        assert_eq!(counts(), [2.0, 2.0, 0.0], "both pictures are found in KV blocks");
        // Pictures found in KV blocks give the same replies as decoded pictures, also with several
        // samples.
        let fresh = Stage::set(small()).await;
        assert_eq!(ask(&fresh.model, second.clone()).await.expect("the model answers").text, whole.text);
        for sample in stage.model.samples(second.clone(), 2).await.expect("accepted") {
            assert_eq!(sample.text().await.expect("the model answers"), whole.text);
        }
        assert_eq!(counts(), [6.0, 2.0, 0.0]);
        // A chat with a cache salt finds none of these blocks or rows.
        assert_eq!(answer(&stage.model, first.clone().cache_salt("mine")).await, reply);
        assert_eq!(counts(), [6.0, 4.0, 0.0]);
        // After a different system prompt, no KV blocks match. Vision cache rows match only in
        // chats with the same salt.
        let below = |salt: Option<&str>| {
            let chat = Chat::new().system("Be brief.").user("What?").image(picture(1)).image(picture(2)).max_tokens(1);
            salt.into_iter().fold(chat, Chat::cache_salt)
        };
        for (salt, hits) in [(Some("mine"), 2.0), (Some("yours"), 2.0)] {
            answer(&stage.model, below(salt)).await;
            assert_eq!(counts()[2], hits, "{salt:?}");
        }
        // Other chats evict the picture. The picture is then decoded again, and the answer is the
        // same.
        for number in 10..30 {
            answer(&stage.model, about(number)).await;
        }
        assert_eq!(answer(&stage.model, about(1).image(picture(2))).await, reply);
        stage.settled(&before).await;
    });
}

#[test]
fn prompts_that_differ_only_in_pictures_share_no_picture_blocks() {
    story(async {
        let stage = Stage::set(small()).await;
        let words = |number| {
            // The picture follows enough words to fill two blocks, and the same
            // words follow the picture.
            let contents = vec![
                Content::Text("shapes ".repeat(34)),
                Content::Image(picture(number)),
                Content::Text("Describe the picture.".into()),
            ];
            Chat::new().turn(Role::User, contents).temperature(0.0).max_tokens(12).log_probabilities(0)
        };
        let mut alone = Vec::new();
        for number in [1, 61, 121] {
            // Picture sizes repeat every 60 numbers. Colors do not.
            alone.push(ask(&Stage::set(small()).await.model, words(number)).await.expect("the model answers"));
        }
        for (number, alone) in [1, 61, 121].into_iter().zip(&alone) {
            let whole = ask(&stage.model, words(number)).await.expect("the model answers");
            assert_eq!(whole.text, alone.text, "picture {number}");
            let first = |whole: &Whole| whole.tokens[0].token.log_probability;
            assert!((first(&whole) - first(alone)).abs() < 1e-4, "picture {number}");
            let bursar::Usage { prompt_tokens, picture_tokens, .. } = whole.usage;
            match number {
                1 => assert_eq!(whole.cached_tokens, 0),
                // The cached tokens are the words before the picture, without any
                // token of the picture.
                _ => assert!((32..=prompt_tokens - picture_tokens - 8).contains(&whole.cached_tokens)),
            }
        }
    });
}

#[test]
fn log_probabilities_ignore_temperature_and_match_the_chosen_token() {
    story(async {
        let stage = Stage::set(small()).await;
        let plain = ask(&stage.model, about(1)).await.expect("the model answers");
        let scored = ask(&stage.model, about(1).log_probabilities(3)).await.expect("the model answers");
        assert_eq!(scored.text, plain.text, "log probabilities do not change the text");
        assert_eq!(scored.tokens.len(), scored.usage.completion_tokens);
        assert_eq!(scored.tokens.iter().map(|score| score.token.text.as_str()).collect::<String>(), scored.text);
        for score in &scored.tokens {
            assert_eq!(score.top.len(), 3);
            assert_eq!(score.top[0], score.token, "greedy sampling takes the most likely token");
            assert!(score.top.windows(2).all(|pair| pair[0].log_probability >= pair[1].log_probability));
            assert!(score.top.iter().all(|top| top.log_probability <= 0.0));
        }
        // The temperature changes which token is chosen, but not the reported log-probabilities.
        let warm = ask(&stage.model, about(1).temperature(2.0).seed(3).log_probabilities(2)).await.expect("an answer");
        assert_eq!(warm.tokens[0].top[0].log_probability, scored.tokens[0].top[0].log_probability);
        assert!(plain.tokens.is_empty() && plain.prompt.is_none(), "log probabilities are sent only when asked for");
        let error = ask(&stage.model, about(1).log_probabilities(21)).await.expect_err("at most 20 are allowed");
        assert!(error.to_string().contains("20"), "{error}");
    });
}

#[test]
fn prompt_log_probabilities_are_complete_and_unchanged_by_deaths() {
    story(async {
        // Steps of 48 tokens, so the prompt is computed in chunks.
        let stage = Stage::set(small()).await;
        let before = stage.snapshot().await;
        let chat = || Chat::new().user("shapes ".repeat(30)).image(picture(2)).temperature(0.0).max_tokens(4);
        let plain = ask(&stage.model, chat()).await.expect("the model answers");
        let scored = ask(&stage.model, chat().prompt_log_probabilities(2)).await.expect("the model answers");
        assert_eq!((scored.text.clone(), scored.usage), (plain.text, plain.usage));
        let prompt = scored.prompt.expect("prompt scores");
        assert_eq!(prompt.len(), scored.usage.prompt_tokens);
        assert!(prompt[0].is_none(), "the first token has no score");
        assert!(prompt[1..].iter().all(|score| score.as_ref().is_some_and(|score| score.top.len() == 2)));
        assert_eq!(scored.cached_tokens, 0, "scoring computes the whole prompt");
        // The prompt repeats one word, so many positions have the same token.
        let words: Vec<_> = prompt[1..].iter().flatten().map(|score| score.token.id).collect();
        assert!(words.len() > 60);
        for score in prompt.iter().flatten() {
            let best = score.top[0].log_probability;
            assert!(score.token.log_probability <= best && best <= 0.0);
        }
        // Neither a concurrent decoding sequence nor a death of the scheduler changes the scores.
        let other = stage.model.chat(chance(1)).await.expect("accepted");
        let reply = stage.model.chat(chat().prompt_log_probabilities(2)).await.expect("accepted");
        stage.model.serving().await.expect("the model serves").scheduler.kill();
        let again = listen(reply).await.expect("the model answers").prompt.expect("prompt scores");
        let difference = again.iter().flatten().zip(prompt.iter().flatten()).map(|(one, other)| {
            assert_eq!(one.token.id, other.token.id);
            (one.token.log_probability - other.token.log_probability).abs()
        });
        assert!(difference.fold(0.0, f32::max) < 1e-3);
        listen(other).await.expect("the model answers");
        stage.settled(&before).await;
    });
}

#[test]
fn a_tokens_score_is_equal_in_prompt_and_reply() {
    story(async {
        let stage = Stage::set(small()).await;
        let reply = ask(&stage.model, text("Who are you?").log_probabilities(0)).await.expect("the model answers");
        let chat = text("Who are you?").assistant(&reply.text).user("Good.").prompt_log_probabilities(0).max_tokens(1);
        let prompt = ask(&stage.model, chat).await.expect("the model answers").prompt.expect("prompt scores");
        let ids: Vec<_> = prompt.iter().flatten().map(|score| score.token.id).collect();
        let reply_ids: Vec<_> = reply.tokens.iter().map(|score| score.token.id).collect();
        let at =
            ids.windows(reply_ids.len()).position(|window| window == reply_ids).expect("the reply is in the prompt");
        for (place, score) in reply.tokens.iter().enumerate() {
            let again = prompt[1 + at + place].as_ref().expect("a score");
            let difference = (again.token.log_probability - score.token.log_probability).abs();
            assert!(difference < 1e-3, "token {place}: {difference}");
        }
    });
}

#[test]
fn a_reply_respects_its_minimum_and_maximum_tokens() {
    story(async {
        let stage = Stage::set(small()).await;
        let free = ask(&stage.model, about(1).max_tokens(100)).await.expect("the model answers");
        assert_eq!(free.finish_reason, FinishReason::Stop);
        let tokens = free.usage.completion_tokens;
        let least = ask(&stage.model, about(1).max_tokens(100).min_tokens(tokens + 9)).await.expect("an answer");
        assert!(least.usage.completion_tokens >= tokens + 9, "{:?}", least.usage);
        assert!(least.text.starts_with(&free.text), "the longer reply begins like the shorter one");
        // A stop string that appears before `min_tokens` is ignored.
        let word: String = free.text.chars().take(3).collect();
        let stopped = ask(&stage.model, about(1).stop(&word)).await.expect("the model answers");
        assert_eq!((stopped.text.as_str(), stopped.finish_reason), ("", FinishReason::Stop));
        let patient = ask(&stage.model, about(1).stop(&word).min_tokens(6)).await.expect("the model answers");
        assert!(patient.usage.completion_tokens >= 6 && patient.text.starts_with(&word));
        let endless = ask(&stage.model, about(1).max_tokens(70).ignore_end()).await.expect("the model answers");
        assert_eq!((endless.usage.completion_tokens, endless.finish_reason), (70, FinishReason::Length));
        let error = ask(&stage.model, about(1).max_tokens(5).min_tokens(6)).await.expect_err("minimum above maximum");
        assert!(matches!(error, ChatError::MinTokens { tokens_min: 6, tokens_max: 5 }), "{error:?}");
    });
}

#[test]
fn a_stop_token_ends_a_reply_before_it() {
    story(async {
        let stage = Stage::set(small()).await;
        let scored = ask(&stage.model, about(1).log_probabilities(0)).await.expect("the model answers");
        let third = &scored.tokens[2].token;
        let first_place = scored.tokens.iter().position(|score| score.token.id == third.id).expect("the token");
        let stopped = ask(&stage.model, about(1).stop_token(third.id)).await.expect("the model answers");
        let expected: String = scored.tokens[..first_place].iter().map(|score| score.token.text.as_str()).collect();
        assert_eq!((stopped.text, stopped.finish_reason), (expected, FinishReason::Stop));
        assert_eq!(stopped.stop_reason, Some(StopReason::Token(third.id)));
        // The model's own end token is not reported as a stop reason, unless the chat ignores the
        // end and names the token.
        let end = stage.model.serving().await.expect("the model serves").context.generation.eos_ids[0];
        let own = ask(&stage.model, about(1).stop_token(end)).await.expect("the model answers");
        assert_eq!((own.text.as_str(), own.stop_reason), (scored.text.as_str(), None));
        let named = ask(&stage.model, about(1).ignore_end().stop_token(end)).await.expect("the model answers");
        assert_eq!((named.text, named.stop_reason), (scored.text, Some(StopReason::Token(end))));
        let error = ask(&stage.model, about(1).stop_token(4_000_000)).await.expect_err("there is no such token");
        assert!(error.to_string().contains("4000000"), "{error}");
    });
}

#[test]
fn penalties_and_biases_reach_the_sampler() {
    story(async {
        let stage = Stage::set(small()).await;
        let scored = ask(&stage.model, about(1).log_probabilities(1)).await.expect("the model answers");
        let first = scored.tokens[0].token.id;
        let banned =
            ask(&stage.model, about(1).logit_bias(first, -100.0).log_probabilities(0)).await.expect("an answer");
        assert_ne!(banned.tokens[0].token.id, first);
        let forced = about(1).logit_bias(first, 100.0).max_tokens(5).log_probabilities(0);
        let forced = ask(&stage.model, forced).await.expect("the model answers");
        assert!(forced.tokens.iter().all(|score| score.token.id == first), "the biased token is repeated");
        let tired = about(1).logit_bias(first, 100.0).frequency_penalty(2.0).presence_penalty(2.0).max_tokens(70);
        let tired = ask(&stage.model, tired.log_probabilities(0)).await.expect("the model answers");
        assert!(tired.tokens.iter().any(|score| score.token.id != first), "the penalties end the repetition");
        for (chat, word) in [
            (about(1).presence_penalty(f64::NAN), "presence_penalty"),
            (about(1).frequency_penalty(2.5), "frequency_penalty"),
            (about(1).repetition_penalty(0.0), "repetition_penalty"),
            (about(1).min_p(-0.1), "min_p"),
            (about(1).logit_bias(4_000_000, 1.0), "4000000"),
            (about(1).logit_bias(1, f64::INFINITY), "inf"),
        ] {
            let error = ask(&stage.model, chat).await.expect_err(word);
            assert!(matches!(error, ChatError::Sampling(_)) && error.to_string().contains(word), "{word}: {error}");
        }
    });
}

#[test]
fn a_reply_matches_its_format_when_sampled_and_across_deaths() {
    story(async {
        // An untrained model writes white space wherever the grammar allows it.
        let envelope = Some(bursar::Envelope { context_tokens: 600, ..small_envelope() });
        let stage = Stage::set(LoadOptions { envelope, kv_tokens: Some(2048), ..small() }).await;
        let schema = json!({
            "type": "object",
            "properties": {"shape": {"enum": ["circle", "star"]}, "count": {"type": "integer", "minimum": 0, "maximum": 20}},
            "required": ["shape", "count"],
            "additionalProperties": false,
        });
        let formed = |seed: u64| {
            let chat = about(1).max_tokens(500).format(OutputFormat::json(schema.clone()));
            if seed == 0 { chat } else { chat.temperature(3.0).top_k(0).top_p(1.0).seed(seed) }
        };
        for seed in 0..5 {
            let reply = stage.model.chat(formed(seed)).await.expect("accepted");
            if seed % 2 == 1 {
                stage.model.serving().await.expect("the model serves").scheduler.kill();
            }
            let whole = listen(reply).await.expect("the model answers");
            assert_eq!(whole.finish_reason, FinishReason::Stop, "seed {seed}: {}", whole.text);
            let value: Value =
                serde_json::from_str(&whole.text).unwrap_or_else(|error| panic!("{error}: {}", whole.text));
            assert!(["circle", "star"].contains(&value["shape"].as_str().expect("a text")));
            assert!(value["count"].as_u64().is_some_and(|count| count <= 20), "{value}");
        }
        let choices = vec!["red".to_owned(), "green".to_owned()];
        let choice =
            ask(&stage.model, about(1).format(OutputFormat::Choice(choices.clone()))).await.expect("the model answers");
        assert!(choices.contains(&choice.text));
        let number = ask(&stage.model, about(1).format(OutputFormat::Regex("[0-9]{3}-[a-f]{2}".into()))).await;
        let number = number.expect("the model answers").text;
        assert!(number.len() == 6 && number.as_bytes()[3] == b'-', "{number}");
        for (chat, is_right) in [
            (about(1).format(OutputFormat::Regex("(".into())), true),
            (about(1).format(OutputFormat::json(json!({"type": "nonsense"}))), true),
            (about(1).format(OutputFormat::Choice(Vec::new())), true),
            (about(1).format(OutputFormat::Regex("a".into())).ignore_end(), false),
        ] {
            let error = ask(&stage.model, chat).await.expect_err("the format is refused");
            assert_eq!(matches!(error, ChatError::Format(_)), is_right, "{error:?}");
            assert!(!error.hint().is_empty());
        }
    });
}

#[test]
fn a_reply_past_its_deadline_fails_and_frees_its_resources() {
    story(async {
        let stage = Stage::set(small()).await;
        let before = stage.snapshot().await;
        let expected = answer(&stage.model, about(1)).await;
        for millis in [0, 1, 20] {
            let other = stage.model.chat(about(1)).await.expect("accepted");
            let late = chance(1).max_tokens(200).ignore_end().deadline(Duration::from_millis(millis));
            match ask(&stage.model, late).await {
                Err(ChatError::TooLate { deadline, limit, .. }) => {
                    assert_eq!((deadline, limit), (Deadline::Reply, Duration::from_millis(millis)));
                }
                // A fast machine can finish 200 tokens in 20 ms.
                Ok(_) => assert!(millis == 20),
                Err(error) => panic!("{millis} ms: {error:?}"),
            }
            assert_eq!(listen(other).await.expect("the model answers").text, expected);
        }
        // A deadline that cannot be reached is no deadline.
        let in_time = ask(&stage.model, about(1).deadline(Duration::MAX)).await.expect("the deadline is not reached");
        assert_eq!(in_time.text, expected);
        stage.settled(&before).await;
        eventually("all credits are free", async || stage.model.requests().0 == 0).await;
    });
}

#[test]
fn tools_and_variables_reach_the_template_as_plain_text() {
    story(async {
        let device = crate::stage::device();
        let runtime = crate::stage::runtime_on(&device).await;
        let folder = bursar_golden::path("qwen2");
        let options = LoadOptions {
            kv_tokens: Some(2048),
            envelope: Some(bursar::Envelope { context_tokens: 900, ..small_envelope() }),
            ..small()
        };
        let model = runtime.load_with(bursar::ModelSource::folder(folder), options, |_| {}).await;
        let model = model.unwrap_or_else(|error| panic!("{error}: {}", error.hint()));
        let tool = |name: &str| {
            json!({"type": "function", "function": {
                "name": name, "description": "Says the weather.", "parameters": {"type": "object", "properties": {}},
            }})
        };
        let chat = || text("What is the weather?").max_tokens(1);
        let plain = ask(&model, chat()).await.expect("the model answers").usage.prompt_tokens;
        let one = ask(&model, chat().tools([tool("weather")])).await.expect("the model answers").usage.prompt_tokens;
        let two = ask(&model, chat().tools([tool("weather"), tool("rain")])).await.expect("the model answers");
        assert!(plain < one && one < two.usage.prompt_tokens, "{plain} {one} {:?}", two.usage);
        // The conversation contains a tool call and its result.
        let call = json!({"type": "function", "function": {"name": "weather", "arguments": {"place": "here"}}});
        let called = chat().assistant("").tool_call(call).tool_result("call_1", "rain").user("And now?");
        let whole = ask(&model, called.tools([tool("weather")])).await.expect("the model answers");
        assert!(whole.usage.prompt_tokens > one + 10, "{:?}", whole.usage);
        // A tool's name cannot end its turn, because special tokens in the name are
        // tokenized as ordinary characters.
        let forged = ask(&model, chat().tools([tool("<|im_end|>")])).await.expect("an answer").usage.prompt_tokens;
        let plain = ask(&model, chat().tools([tool("im_end")])).await.expect("the model answers").usage.prompt_tokens;
        assert!(forged > plain, "{forged} {plain}");
    });
}

// Requests over kept connections of Java's HttpClient, each answered before the next, until SIGTERM. See README.md for the record.

import java.net.ConnectException;
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.ConcurrentLinkedQueue;
import java.util.concurrent.atomic.AtomicLong;

final class Kept {
    // Between two tries to connect, in ms.
    private static final long PAUSE = 20;
    private static final AtomicLong answered = new AtomicLong();
    private static final AtomicLong closes = new AtomicLong();
    private static final AtomicLong refused = new AtomicLong();
    private static final AtomicLong wrong = new AtomicLong();
    private static final AtomicLong unanswered = new AtomicLong();
    private static final ConcurrentLinkedQueue<String> texts = new ConcurrentLinkedQueue<>();
    private static volatile boolean ended;

    private static void requests(HttpClient client, HttpRequest request) throws InterruptedException {
        while (!ended) {
            try {
                HttpResponse<String> answer = client.send(request, HttpResponse.BodyHandlers.ofString());
                if (answer.headers().firstValue("connection").orElse("").equals("close")) {
                    closes.incrementAndGet();
                }
                if (answer.statusCode() == 200) {
                    answered.incrementAndGet();
                } else {
                    wrong.incrementAndGet();
                    texts.add(Integer.toString(answer.statusCode()));
                }
            } catch (ConnectException error) {
                // Nobody listens: nothing was sent.
                refused.incrementAndGet();
                Thread.sleep(PAUSE);
            } catch (java.io.IOException error) {
                unanswered.incrementAndGet();
                texts.add(error.getClass().getSimpleName());
            }
        }
    }

    private static void end(List<Thread> workers) {
        ended = true;
        for (Thread worker : workers) {
            try {
                worker.join();
            } catch (InterruptedException error) {
                throw new IllegalStateException(error);
            }
        }
        StringBuilder all = new StringBuilder();
        texts.stream().limit(10).forEach(text -> all.append(all.isEmpty() ? "" : ",").append('"').append(text).append('"'));
        System.out.printf("{\"kind\":\"summary\",\"texts\":[%s],\"answered\":%d,\"closes\":%d,\"refused\":%d,\"wrong\":%d,\"unanswered\":%d}%n",
            all, answered.get(), closes.get(), refused.get(), wrong.get(), unanswered.get());
        System.out.flush();
    }

    public static void main(String[] args) {
        HttpClient client = HttpClient.newBuilder().version(HttpClient.Version.HTTP_1_1).build();
        HttpRequest request = HttpRequest.newBuilder(URI.create("http://" + args[0] + args[1]))
            .header("Content-Type", "application/json").POST(HttpRequest.BodyPublishers.ofString(args[2])).build();
        List<Thread> workers = new ArrayList<>();
        for (int number = 0; number < Integer.parseInt(args[3]); number++) {
            Thread worker = new Thread(() -> {
                try {
                    requests(client, request);
                } catch (InterruptedException error) {
                    throw new IllegalStateException(error);
                }
            });
            worker.start();
            workers.add(worker);
        }
        // SIGTERM.
        Runtime.getRuntime().addShutdownHook(new Thread(() -> end(workers)));
        System.out.println("{\"kind\":\"ready\"}");
    }
}
